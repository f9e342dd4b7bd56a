"""Names of the fusion sites, free of torch so that configuration checks stay fast."""

SITE_NAMES = ("modulate", "swiglu", "gated_residual", "qk_norm_rope")
