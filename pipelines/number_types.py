"""Bounded numbers of configurations, as msgspec checks them. Free of torch."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_STEPS = 1000
"""Denoising steps; schedules are trained on as many noise levels."""
MAX_BATCH = 64
"""Images or videos made at once."""

Count = Annotated[int, Meta(ge=1)]
Steps = Annotated[int, Meta(ge=1, le=MAX_STEPS)]
Batch = Annotated[int, Meta(ge=1, le=MAX_BATCH)]
NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
