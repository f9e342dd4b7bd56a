"""The files that images become: image.png, or image_0.png and so on."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from accel.errors import OutputError
from pipelines.flux2.request import ImageResult


def image_files(result: ImageResult, *, model: str, config_hash: str, note: str) -> dict[str, bytes]:
    """File name -> PNG, all of them encoded before any is written.

    model, config_hash: of the run, written into every file beside prompt and seed. note: what a reader of the
    images must know, or empty.
    Raises: OutputError naming the first image with values that are not finite.
    """
    count = len(result.images)
    names = ["image.png"] if count == 1 else [f"image_{index}.png" for index in range(count)]
    text = {
        "Software": "samebit",
        "prompt": result.prompt,
        "seed": str(result.seed),
        "model": model,
        "config_hash": config_hash,
    } | ({"Comment": note} if note else {})
    pixels = {name: _eight_bit(image, name=name) for name, image in zip(names, result.images, strict=True)}
    return {name: _png(values, text) for name, values in pixels.items()}


def _eight_bit(image: Tensor, *, name: str) -> npt.NDArray[np.uint8]:
    """(3, H, W) in [0, 1] -> (H, W, 3), rounded to nearest as diffusers does."""
    bad = int(image.numel() - torch.isfinite(image).sum())
    if bad:
        raise OutputError(
            f"{name}: {bad} of {image.numel()} values are not finite. No output file was written. "
            "Check the weights, or run with dtype=fp32."
        )
    values = image.permute(1, 2, 0).to(torch.float32).numpy()
    return np.ascontiguousarray((values * 255).round().astype(np.uint8))


def _png(pixels: npt.NDArray[np.uint8], text: Mapping[str, str]) -> bytes:
    info = PngInfo()
    for key, value in text.items():
        info.add_itxt(key, value)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()
