"""The picture that a video starts with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf
from diffusers.video_processor import VideoProcessor
from PIL import Image, ImageOps
from torch import Tensor

from accel.errors import ObservationError

_MODES = ("RGB", "RGBA", "RGBX", "L", "LA", "P", "PA", "1", "CMYK", "YCbCr")


def open_first_frame(path: str | Path) -> Image.Image:
    """An image file, upright and RGB; transparency is dropped.

    Raises: ObservationError if the file is missing, is no image, or has no 8-bit colours.
    """
    try:
        with Image.open(Path(path).expanduser()) as image:
            image.load()
    except FileNotFoundError:
        raise ObservationError(f"model.image: no file {path}. Check the path.") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ObservationError(f"model.image: {path} is no readable image ({error}).") from None
    return _rgb(ImageOps.exif_transpose(image))


def _rgb(image: Image.Image) -> Image.Image:
    """Raises: ObservationError for more than 8 bits a colour, whose range no file declares."""
    if image.mode not in _MODES:
        raise ObservationError(
            f"model.image: pixels of mode {image.mode}; save the image with 8 bits a colour, as PNG or JPEG."
        )
    return image.convert("RGBA").convert("RGB") if image.mode in ("P", "PA") else image.convert("RGB")


def first_frame_pixels(image: Image.Image, *, height: int, width: int, crf: int, vae_ratio: int) -> Tensor:
    """RGB of any size -> fp32 (1, 3, height, width) in [-1, 1], on the CPU.

    crf: H.264 quality to compress with first, 0 for not at all. vae_ratio: pixels a latent, per axis.
    """
    if crf:
        image = Image.fromarray(apply_image_conditioning_crf(np.array(image), crf))
    processor = VideoProcessor(vae_scale_factor=vae_ratio, resample="bilinear")
    pixels: Tensor = processor.preprocess(image, height=height, width=width)
    return pixels
