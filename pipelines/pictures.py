"""Pictures that a configuration names, read from files."""

from __future__ import annotations

from os.path import exists, expanduser, isfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from accel.errors import ConfigError

_MODES = ("RGB", "RGBA", "RGBX", "L", "LA", "P", "PA", "1", "CMYK", "YCbCr")


class PictureError(ValueError):
    """A file that gives no picture. The message names the file and says why."""


def open_picture(path: str | Path, *, name: str) -> tuple[Image.Image, tuple[str, ...]]:
    """An image file, upright and RGB, with notes of what was dropped.

    name: of the setting, for messages.
    Raises: ConfigError if the file is missing, is no image, or has no 8-bit colours.
    """
    try:
        image, frames = decode(expanduser(path))
    except PictureError as error:
        raise ConfigError(f"{name}: {error}") from None
    rgb, notes = as_rgb(image, name=name)
    return rgb, (*notes, f"{name}: has {frames} frames; the first one is used.") if frames > 1 else notes


def decode(path: str | Path) -> tuple[Image.Image, int]:
    """First frame of an image file, upright, in its own mode; how many the file has. Raises: PictureError."""
    if exists(path) and not isfile(path):  # opening a pipe would wait for its writer
        raise PictureError(f"{path} is no regular file. Name an image file.")
    try:
        with Image.open(path) as image:
            frames = getattr(image, "n_frames", 1)  # asked after `load`, a GIF forgets its pixels
            image.load()
            return upright(image), frames
    except FileNotFoundError:
        raise PictureError(f"no file {path}. Check the path.") from None
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, TypeError, ...
        why = getattr(error, "strerror", None) or error
        raise PictureError(f"{path} is no readable image ({why}).") from None


def upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF data say. Raises: ValueError if they are damaged."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # Pillow raises SyntaxError, struct.error, TypeError, ...
        raise ValueError("the EXIF data of the image are damaged; nobody knows how it is turned") from None


def as_rgb(image: Image.Image, *, name: str) -> tuple[Image.Image, tuple[str, ...]]:
    """Three 8-bit channels. Like diffusers, colours under transparency are taken as they are.

    Raises: ConfigError for more than 8 bits a colour, whose range no file declares.
    """
    if image.mode not in _MODES:
        raise ConfigError(f"{name}: pixels of mode {image.mode}; save the image with 8 bits a colour.")
    if not image.has_transparency_data:
        return image.convert("RGB"), ()
    opaque = image.convert("RGBA")
    is_transparent = np.asarray(opaque.getchannel("A")).min() < 255
    return opaque.convert("RGB"), (f"{name}: its transparency is ignored.",) if is_transparent else ()
