"""The eager pipeline gives the bits of diffusers' own, from prompt to pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_flux2 import both, make_pair
from torch import Tensor

import pipelines.flux2.stages
from accel.policy import AccelPolicy
from pipelines.transfer import upload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LONG = "word " * 600


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def check(variant: str, precision: str, policy: AccelPolicy, **request: Any) -> None:
    pair = make_pair(variant, DTYPES[precision], policy)
    result, latents, pixels = both(pair, **request)
    assert torch.equal(result.outputs["denoising.latents"], latents)
    # Matrix products of other strides may round differently on a GPU.
    assert result.outputs["denoising.latents"].stride() == latents.stride()
    assert result.images.dtype == DTYPES[precision]
    assert torch.equal(result.images, pixels)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(
    ("variant", "guidance"), [("4b", 1.0), ("4b-base", 1.0), ("4b-base", 4.0), ("dev", 2.5)]
)
@pytest.mark.parametrize("images", [1, 2])
def test_variants(
    variant: str, guidance: float, images: int, precision: str, eager_policy: AccelPolicy
) -> None:
    check(variant, precision, eager_policy, guidance=guidance, images=images)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("variant", ["4b-base", "dev"])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_steps(variant: str, steps: int, precision: str, eager_policy: AccelPolicy) -> None:
    check(variant, precision, eager_policy, steps=steps, guidance=4.0)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("variant", ["4b", "dev"])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (16, 64), (80, 48)])
def test_sizes(variant: str, height: int, width: int, precision: str, eager_policy: AccelPolicy) -> None:
    check(variant, precision, eager_policy, height=height, width=width)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("variant", ["4b-base", "dev"])
@pytest.mark.parametrize("prompt", ["", "ein Hund, 猫 und 🐘", LONG], ids=["empty", "unicode", "truncated"])
def test_prompts(variant: str, prompt: str, precision: str, eager_policy: AccelPolicy) -> None:
    check(variant, precision, eager_policy, prompt=prompt, guidance=3.0)


@pytest.mark.parametrize("precision", DTYPES)
def test_padding_on_the_left(
    precision: str, eager_policy: AccelPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of padding then attend to nothing."""
    theirs = make_pair("dev", DTYPES[precision], eager_policy).theirs
    monkeypatch.setattr(theirs.tokenizer, "padding_side", "left")
    check("dev", precision, eager_policy)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("variant", ["4b-base", "dev"])
@pytest.mark.parametrize("references", [[(64, 80)], [(70, 64), (64, 100)]], ids=["one", "two"])
@pytest.mark.parametrize("images", [1, 2])
def test_reference_images(
    variant: str,
    references: list[tuple[int, int]],
    images: int,
    precision: str,
    eager_policy: AccelPolicy,
) -> None:
    pictures = tuple(picture(*size) for size in references)
    check(variant, precision, eager_policy, guidance=2.0, images=images, pictures=pictures)


@pytest.mark.parametrize("precision", DTYPES)
def test_reference_pixels_are_uploaded_without_waiting(
    precision: str, eager_policy: AccelPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And cast before, to the bits and strides that diffusers' own cast has."""
    given: list[Tensor] = []
    uploaded: list[Tensor] = []

    def spy(values: Tensor, *args: Any, **options: Any) -> Tensor:
        given.append(values)
        uploaded.append(upload(values, *args, **options))
        return uploaded[-1]

    monkeypatch.setattr(pipelines.flux2.stages, "upload", spy)
    check("4b", precision, eager_policy, pictures=(picture(70, 64), picture(64, 100)))
    pixels = [pair for pair in zip(given, uploaded, strict=True) if pair[0].is_floating_point()]
    assert len(pixels) == 2
    for before, after in pixels:
        expected = before.to(DTYPES[precision])
        assert torch.equal(after, expected)
        assert after.stride() == expected.stride()
