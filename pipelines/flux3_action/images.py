"""One camera value of any accepted kind -> float32 (3, H, W) in [0, 1] (spec sections 4 and 15).

Nothing is guessed from pixel values. What an array does not say itself (axis order, colour order,
range) is declared by `ImageFormat`; what contradicts the declaration is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from accel.errors import ObservationError
from pipelines.flux3_action.arrays import real_array
from pipelines.flux3_action.image_format import ImageFormat
from pipelines.pictures import PictureError, decode, upright

RANGE_SLACK = 4 / 255
"""How far outside its range a float may lie, as a share of the range, and be clipped to it.

Resampling and compression overshoot by a few 8-bit steps; more than that is another range.
"""


def to_unit_image(value: Any, *, camera: str, image_format: ImageFormat) -> Tensor:
    """Check one camera image and bring it to float32 (3, H, W) in [0, 1], contiguous, on the CPU.

    value: numpy array, torch tensor, nested list or `PIL.Image`; any strides, either endianness.
    Floats that miss their range by at most `RANGE_SLACK` are clipped. The division is float32
    on the CPU, so equal 8-bit pixels give equal bits whatever carries them.
    Raises: ObservationError naming the camera and what was seen.
    """
    if isinstance(value, Image.Image):
        value, image_format = _pixels_of(value, camera), ImageFormat()
    layout = _layout_of(value, image_format)
    array = real_array(value, name=f"camera '{camera}'", what="pixels as integers or floats")
    channels = len(image_format.order)
    channel_axis = 0 if layout == "chw" else -1
    if array.ndim != 3 or array.shape[channel_axis] != channels or array.size == 0:
        raise ObservationError(_shape_message(array.shape, layout, channels, camera))
    low, high = _range_of(array, image_format, camera)
    channels_first = np.moveaxis(array, channel_axis, 0)[:3]
    if image_format.order.startswith("bgr"):
        channels_first = channels_first[::-1]
    # Axes are turned before bytes become floats: a quarter of the memory is walked in strides.
    pixels = np.ascontiguousarray(channels_first).astype(np.float32)
    if low:
        pixels -= low
    pixels /= high - low
    if low or array.dtype.kind == "f":  # integers from 0 on lie inside
        np.clip(pixels, 0, 1, out=pixels)
    return torch.from_numpy(pixels)


def open_image(path: str | Path, *, camera: str) -> Image.Image:
    """Decode an image file completely and turn it upright.

    Raises: ObservationError naming the camera if the file is missing, damaged or no image.
    """
    try:
        image, _ = decode(path)
    except PictureError as error:
        raise ObservationError(f"camera '{camera}': {error}") from None
    return image


def _pixels_of(image: Image.Image, camera: str) -> npt.NDArray[Any]:
    """Upright RGB pixels: uint8 (H, W, 3), or float32 in [0, 1] where the file has 16 bits."""
    try:
        turned = upright(image)
    except ValueError as error:
        raise ObservationError(f"camera '{camera}': {error}") from None
    if turned.mode.startswith("I;16"):  # 16-bit gray
        gray = np.asarray(turned).astype(np.float32) / np.float32(65535)
        return np.repeat(gray[:, :, None], 3, axis=2)
    if turned.mode in ("I", "F"):
        kind = "floats" if turned.mode == "F" else "32-bit integers"
        raise ObservationError(
            f"camera '{camera}': an image of {kind} has no declared range; save 8 or 16 bits"
        )
    if turned.mode in ("P", "PA"):
        turned = turned.convert("RGBA")  # Pillow warns if a palette with transparency goes straight to RGB
    return np.asarray(turned.convert("RGB"))


def _layout_of(value: Any, image_format: ImageFormat) -> Literal["hwc", "chw"]:
    if image_format.layout != "auto":
        return image_format.layout
    return "chw" if isinstance(value, Tensor) and value.is_floating_point() else "hwc"


def _range_of(array: npt.NDArray[Any], image_format: ImageFormat, camera: str) -> tuple[float, float]:
    """Black and white level, after checking that all values lie between them."""
    is_float = array.dtype.kind == "f"
    if image_format.value_range == "auto":
        low, high = (0.0, 1.0) if is_float else (0.0, 255.0)
    else:
        low, high = image_format.value_range
    seen_low, seen_high = array.min(), array.max()
    if not (np.isfinite(seen_low) and np.isfinite(seen_high)):
        bad = np.count_nonzero(~np.isfinite(array))
        raise ObservationError(f"camera '{camera}': {bad} of {array.size} values are NaN or infinite")
    slack = RANGE_SLACK * (high - low) if is_float else 0.0
    if seen_low.item() < low - slack or seen_high.item() > high + slack:  # exact, whatever the dtype
        raise ObservationError(
            f"camera '{camera}': {array.dtype} values {seen_low} to {seen_high} lie outside {low:g} to "
            f"{high:g}; declare the value_range of the images, e.g. [0, 255], [-1, 1] or [0, 65535]"
        )
    return low, high


def _shape_message(shape: tuple[int, ...], layout: str, channels: int, camera: str) -> str:
    expected = f"({channels}, H, W)" if layout == "chw" else f"(H, W, {channels})"
    ends = (shape[0], shape[-1]) if len(shape) == 3 else ()
    if 0 in shape:
        remedy = "send an image that has pixels"
    elif channels in ends:
        remedy = "declare the layout, hwc or chw"
    elif len(shape) == 2 or 1 in ends:
        remedy = "repeat a gray image in three channels"
    elif 4 in ends:
        remedy = "declare the order, rgba or bgra, to drop the fourth channel"
    else:
        remedy = "send one image of three colours, without a batch axis"
    return f"camera '{camera}': shape {shape} is not {expected}; {remedy}"
