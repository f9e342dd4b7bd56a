"""Videos in two passes have the bits of diffusers' pipelines, chained as their documentation does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ltx2_harness import (
    ALL_SAME,
    EAGER,
    NO_GUIDANCE,
    ours,
    picture,
    same_outputs,
    stock,
    tiny_components,
)
from PIL import Image

from accel.errors import ConfigError
from pipelines.build import build
from pipelines.ltx2.request import VideoRequest, video_request
from pipelines.ltx2.settings import Ltx2Settings
from tasks.config import compose

DEFAULT: dict[str, Any] = {}  # all guidance there is


def request(*, image: Image.Image | None = None, **settings: Any) -> VideoRequest:
    small = {"height": 128, "width": 192, "frames": 9, "steps": 2, "two_stage": True, "image_crf": 0}
    choice = Ltx2Settings(**{**small, **settings})
    return video_request("A red kite over a harbour", settings=choice, size="tiny", seed=7, image=image)


def compare(asked: VideoRequest, variant: str = "2.0", dtype: torch.dtype = torch.float32) -> dict[str, bool]:
    components = tiny_components(variant, dtype, two_stage=True)
    return same_outputs(ours(components).run(asked), stock(components, asked), components)


@pytest.mark.parametrize("with_image", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guidance", [NO_GUIDANCE, DEFAULT], ids=["off", "all"])
def test_equals_diffusers(guidance: dict[str, Any], dtype: torch.dtype, with_image: bool) -> None:
    image = picture() if with_image else None
    assert compare(request(**guidance, image=image), dtype=dtype) == ALL_SAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["2.0-distilled", "2.3"])
def test_other_variants(variant: str, dtype: torch.dtype) -> None:
    steps = None if variant == "2.0-distilled" else 2
    assert compare(request(variant=variant, steps=steps), variant, dtype) == ALL_SAME


@pytest.mark.parametrize("with_image", [False, True])
def test_several_videos_of_a_prompt(with_image: bool) -> None:
    assert compare(request(videos=2, image=picture() if with_image else None)) == ALL_SAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"upsampling_adain": 0.7}, {"upsampling_tone_mapping": 0.6}])
def test_adain_and_tone_mapping(settings: dict[str, float], dtype: torch.dtype) -> None:
    asked = request(**settings)
    assert compare(asked, dtype=dtype) == ALL_SAME
    pipeline = ours(tiny_components("2.0", dtype, two_stage=True))
    assert pipeline.run(asked).digests != pipeline.run(request()).digests


def test_the_video_has_the_size_that_was_asked_for() -> None:
    pipeline = ours(tiny_components(two_stage=True))
    result = pipeline.run(request(height=128, width=256, frames=17))
    assert result.frames.shape == (1, 17, 3, 128, 256)
    assert result.outputs["denoising.latents"].video.shape[1] == 3 * 2 * 4
    assert result.outputs["refinement.refined_latents"].video.shape[1] == 3 * 4 * 8


def test_requests_do_not_disturb_each_other() -> None:
    pipeline = ours(tiny_components(two_stage=True))
    first = pipeline.run(request()).digests
    pipeline.run(request(height=192, frames=17, **NO_GUIDANCE))
    assert pipeline.run(request()).digests == first
    assert pipeline.run(replace(request(), seed=8)).digests != first


def test_another_policy_keeps_the_stages() -> None:
    pipeline = ours(tiny_components(two_stage=True))
    names = [stage.name for stage in pipeline.stages]
    assert names[3:6] == ["denoising", "upsampling", "refinement"]
    other = pipeline.with_policy(replace(EAGER, name="other"))
    assert [stage.name for stage in other.stages] == names
    assert other.run(request()).digests == pipeline.run(request()).digests


def test_the_pipeline_decides_how_many_passes_its_requests_have() -> None:
    sizes = ("model.height=128", "model.width=128", "model.frames=9", "model.steps=2")
    base = ("model=ltx2", "accel=eager", "device=cpu", "size=tiny", *sizes)
    one, two = compose(*base), compose(*base, "model.two_stage=true")
    pipeline = build(two)
    assert pipeline.request_from(one).refinement is not None
    assert build(one).request_from(two).refinement is None
    with pytest.raises(ConfigError, match=r"model\.two_stage: this pipeline was made with True"):
        pipeline.run(build(one).request_from(one))
