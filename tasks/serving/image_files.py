"""Encoded images from strangers."""

from __future__ import annotations

import io

from PIL import Image

from tasks.serving.errors import InvalidRequestError

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 2**24
"""Of one image, 4096 x 4096; a few kilobytes can claim to be many gigapixels."""


def decode_image(data: bytes, *, camera: str) -> Image.Image:
    """A complete JPEG, PNG or WebP file -> image, decoded.

    Raises: InvalidRequestError naming the camera for other formats, damaged files and more than
        `MAX_PIXELS`.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            image.load()
            return image
    except Image.DecompressionBombError:
        raise InvalidRequestError(f"camera '{camera:.40}': more than {MAX_PIXELS} pixels") from None
    except (OSError, SyntaxError, ValueError):
        raise InvalidRequestError(
            f"camera '{camera:.40}': no readable image; send {', '.join(FORMATS)}"
        ) from None
