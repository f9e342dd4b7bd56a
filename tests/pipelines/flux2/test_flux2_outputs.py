"""Files of FLUX.2's images (case C24)."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from accel.errors import OutputError
from pipelines.flux2.outputs import image_files
from pipelines.flux2.request import ImageResult


def files(images: Tensor, *, prompt: str = "a cat", note: str = "") -> dict[str, bytes]:
    result = ImageResult(images=images, prompt=prompt, seed=7, outputs={})
    return image_files(result, model="flux2_klein", config_hash="0123456789ab", note=note)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_pixels_come_back(dtype: torch.dtype) -> None:
    colours = torch.arange(256).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    images = (colours / 255).to(dtype)
    pixels = np.asarray(opened(files(images)["image.png"]))
    expected = (images[0].float() * 255).round().permute(1, 2, 0).numpy()
    assert pixels.shape == (16, 16, 3)
    assert np.array_equal(pixels, expected)


def test_several_images_are_numbered() -> None:
    images = torch.stack([torch.zeros(3, 16, 32), torch.ones(3, 16, 32)])
    written = files(images)
    assert list(written) == ["image_0.png", "image_1.png"]
    assert opened(written["image_1.png"]).size == (32, 16)
    assert [int(np.asarray(opened(data)).max()) for data in written.values()] == [0, 255]


def test_a_png_tells_where_it_came_from() -> None:
    text = opened(
        files(torch.zeros(1, 3, 16, 16), prompt="猫\nzwei", note="It means nothing.")["image.png"]
    ).text
    assert text == {
        "Software": "samebit",
        "prompt": "猫\nzwei",
        "seed": "7",
        "model": "flux2_klein",
        "config_hash": "0123456789ab",
        "Comment": "It means nothing.",
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_image(value: float) -> None:
    images = torch.zeros(2, 3, 16, 16)
    images[1, 0, 3, 4] = value
    with pytest.raises(OutputError, match=r"image_1\.png: 1 of 768 values"):
        files(images)
