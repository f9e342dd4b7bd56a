"""How a stage is made faster without changing its bits. Knows no model."""
