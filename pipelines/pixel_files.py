"""Pixels of a model as 8-bit values, and those as PNG. Equal inputs give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from accel.errors import OutputError

Pixels = npt.NDArray[np.uint8]
"""(..., height, width, 3)."""


def eight_bit(values: Tensor) -> Pixels:
    """(..., 3, H, W) in [0, 1], on the CPU -> (..., H, W, 3), rounded to nearest as diffusers does."""
    channels_last = values.movedim(-3, -1).float().numpy()
    return np.ascontiguousarray((channels_last * 255).round().astype(np.uint8))


def require_finite(name: str, values: Tensor) -> None:
    """Raises: OutputError if a value is NaN or infinite. name: of what would be written."""
    bad = values.numel() - int(values.isfinite().sum())
    if bad:
        raise OutputError(
            f"{name}: {bad} of {values.numel()} values are not finite. No output file was written. "
            "Check the weights and the guidance; if this ran in bf16, try dtype=fp32."
        )


def png(pixels: Pixels, *, metadata: Mapping[str, str]) -> bytes:
    """One image, (height, width, 3). metadata: text chunks of the file."""
    text = PngInfo()
    for key, value in metadata.items():
        text.add_itxt(key, value)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=text)
    return buffer.getvalue()
