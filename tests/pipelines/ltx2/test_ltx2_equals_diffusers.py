"""Every output of our pipeline has the bits of diffusers' pipeline around the same components."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AudioVideoAttnProcessor,
    LTX2VideoTransformerBlock,
)
from ltx2_harness import ALL_SAME, NO_GUIDANCE, ours, picture, rebuilt, same_outputs, stock, tiny_components
from PIL import Image

from pipelines.ltx2.request import video_request
from pipelines.ltx2.settings import Ltx2Settings

PROMPT = "A red kite over a harbour"
SMALL = {"height": 64, "width": 96, "frames": 9, "steps": 2}
TEXT_ONLY = {**NO_GUIDANCE, "guidance": 3.0, "guidance_audio": 7.0}
FULL: dict[str, Any] = {}  # the defaults: three kinds of passes


def compare(
    settings: dict[str, Any],
    *,
    prompt: str = PROMPT,
    image: Image.Image | None = None,
    **component_choice: Any,
) -> dict[str, bool]:
    components = tiny_components(**component_choice)
    choice = Ltx2Settings(**{**SMALL, "variant": component_choice.get("variant", "2.0"), **settings})
    request = video_request(prompt, settings=choice, size="tiny", seed=7, image=image)
    result = ours(components).run(request)
    return same_outputs(result, stock(components, request), components)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guidance", [NO_GUIDANCE, TEXT_ONLY, FULL], ids=["off", "text", "all"])
def test_guidance(guidance: dict[str, Any], dtype: torch.dtype) -> None:
    assert compare(guidance, dtype=dtype) == ALL_SAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("perturbed_attn", [False, True])
def test_three_kinds_of_passes(perturbed_attn: bool, dtype: torch.dtype) -> None:
    assert compare(FULL, perturbed_attn=perturbed_attn, dtype=dtype) == ALL_SAME


@pytest.mark.parametrize(
    "guidance",
    [
        {"stg": 0.0},
        {"guidance_modality": 1.0},
        {**NO_GUIDANCE, "stg": 1.5},
        {**NO_GUIDANCE, "guidance_modality": 2.0, "guidance_rescale": 1.0},
        {**NO_GUIDANCE, "guidance_audio": 4.0},
        {"stg_blocks": (0, 1)},
    ],
)
def test_guidance_in_parts(guidance: dict[str, Any]) -> None:
    assert compare(guidance, perturbed_attn=True) == ALL_SAME


@pytest.mark.parametrize(
    "size",
    [
        {"height": 64, "width": 64, "frames": 1},
        {"height": 96, "width": 64, "frames": 17, "fps": 25.0},
        {"height": 64, "width": 160, "frames": 25, "fps": 12.5},
        {"steps": 5},
    ],
)
def test_sizes(size: dict[str, Any]) -> None:
    assert compare(size) == ALL_SAME


@pytest.mark.parametrize("prompt", ["x", "a much longer prompt " * 5, "many words " * 5000])
def test_prompts(prompt: str) -> None:
    assert compare({**TEXT_ONLY, "negative_prompt": "blurry, dark"}, prompt=prompt) == ALL_SAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guidance", [NO_GUIDANCE, FULL], ids=["off", "all"])
def test_first_frame(guidance: dict[str, Any], dtype: torch.dtype) -> None:
    assert compare({**guidance, "image_crf": 0}, image=picture(), dtype=dtype) == ALL_SAME


@pytest.mark.parametrize("guidance", [NO_GUIDANCE, FULL], ids=["off", "all"])
def test_a_first_frame_that_is_the_only_one(guidance: dict[str, Any]) -> None:
    assert compare({**guidance, "frames": 1, "image_crf": 0}, image=picture()) == ALL_SAME


def test_first_frame_through_h264() -> None:
    pytest.importorskip("av")
    assert compare({}, image=picture()) == ALL_SAME


@pytest.mark.parametrize("with_image", [False, True])
def test_several_videos_of_a_prompt(with_image: bool) -> None:
    image = picture() if with_image else None
    assert compare({"videos": 2, "image_crf": 0}, image=image) == ALL_SAME


def test_the_other_transformer_is_the_librarys_own() -> None:
    """Without the processors and sums that ours takes, or this file would compare ours with itself."""
    components = tiny_components()
    ours(components)
    (block, *_), (library, *_) = (
        each.transformer_blocks for each in (components.transformer, rebuilt(components.transformer))
    )
    assert type(library.attn2.processor) is LTX2AudioVideoAttnProcessor
    assert library.get_mod_params is LTX2VideoTransformerBlock.get_mod_params
    assert type(block.attn2.processor) is not type(library.attn2.processor)
    assert block.get_mod_params is not library.get_mod_params


def test_distilled() -> None:
    settings = {"steps": None}
    assert compare(settings, variant="2.0-distilled") == ALL_SAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_2_3(dtype: torch.dtype) -> None:
    assert compare(FULL, variant="2.3", dtype=dtype) == ALL_SAME
