"""What the pixel arrays of a client mean. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from accel.errors import ConfigError

Layout = Literal["auto", "hwc", "chw"]
Order = Literal["rgb", "bgr", "rgba", "bgra"]
ValueRange = Literal["auto"] | tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """Declares what an array can't say. Encoded images and `PIL.Image` say it themselves.

    layout: `auto` takes float tensors of torch as CHW and everything else as HWC.
    order: colours of the channel axis; the fourth channel of `rgba` and `bgra` is dropped, not blended.
    value_range: values of black and white; `auto` is 0..1 for floats and 0..255 for integers.
    Raises: ConfigError for a range that is empty or not finite.
    """

    layout: Layout = "auto"
    order: Order = "rgb"
    value_range: ValueRange = "auto"

    def __post_init__(self) -> None:
        if self.value_range == "auto":
            return
        low, high = self.value_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(
                f"value_range: [{low:g}, {high:g}] holds no values; give those of black and of white, "
                "the smaller first, e.g. [-1, 1]."
            )
