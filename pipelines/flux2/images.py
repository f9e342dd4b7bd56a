"""Reference images: files to pixels, as diffusers prepares them for FLUX.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image
from torch import Tensor

from accel.errors import ConfigError
from pipelines.flux2.image_size import TOKEN_PIXELS
from pipelines.flux2.position_ids import Grid
from pipelines.pictures import as_rgb, open_picture

MAX_PIXELS = 1024 * 1024
"""Larger images are scaled down to this area."""


@dataclass(frozen=True)
class Reference:
    """pixels: fp32 (1, 3, H, W) in [-1, 1] on the CPU; H and W are multiples of 16.

    notes: what was changed.
    """

    pixels: Tensor
    notes: tuple[str, ...] = ()

    @property
    def grid(self) -> Grid:
        """Rows and columns of tokens."""
        height, width = self.pixels.shape[2:]
        return height // TOKEN_PIXELS, width // TOKEN_PIXELS


def load_references(paths: Sequence[str]) -> tuple[Reference, ...]:
    """Read the images that `model.images` lists. Raises: ConfigError naming the entry."""
    return tuple(_load(f"model.images[{index}]", path) for index, path in enumerate(paths))


def _load(name: str, path: str) -> Reference:
    image, notes = open_picture(path, name=name)
    reference = reference_from(image, name=name)
    return replace(reference, notes=(*notes, *reference.notes))


def reference_from(image: Image.Image, *, name: str) -> Reference:
    """Scale to at most `MAX_PIXELS`, crop the middle to multiples of 16, normalise.

    name: for messages. Raises: ConfigError for images that are too small, too long or of an unclear range.
    """
    processor = Flux2ImageProcessor(vae_scale_factor=TOKEN_PIXELS)
    try:
        processor.check_image_input(image)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}. Use another image or crop it.") from error
    rgb, notes = as_rgb(image, name=name)
    scaled = processor._resize_if_exceeds_area(rgb, MAX_PIXELS)
    if scaled.size != rgb.size:
        sizes = f"from {rgb.width}x{rgb.height} to {scaled.width}x{scaled.height}"
        notes = (*notes, f"{name}: scaled {sizes} pixels.")
    pixels = processor.preprocess(
        scaled,
        height=scaled.height // TOKEN_PIXELS * TOKEN_PIXELS,
        width=scaled.width // TOKEN_PIXELS * TOKEN_PIXELS,
        resize_mode="crop",
    )
    return Reference(pixels, notes)
