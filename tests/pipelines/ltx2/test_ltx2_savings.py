"""LTX-2.0 without the spatio-temporal guidance pass that has no effect there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from ltx2_harness import EAGER, ours, tiny_components

import pipelines.pipeline
from accel.graphs.recording import RecordingBackend
from accel.record import Kind, Reason, SiteOutcome
from accel.runner import Runner
from pipelines.ltx2 import denoising
from pipelines.ltx2.request import VideoRequest, video_request
from pipelines.ltx2.settings import Ltx2Settings

STEPS = 2
SAVING = replace(EAGER, fused={"skip_ineffective_stg": True})


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What every pass of the transformer was for, in order."""
    seen: list[str] = []
    transformer_pass = denoising.transformer_pass

    def counted(
        *args: Any, isolated: bool = False, perturbed: tuple[int, ...] = (), **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append("isolated" if isolated else "stg" if perturbed else "text")
        return transformer_pass(*args, isolated=isolated, perturbed=perturbed, **options)

    monkeypatch.setattr(denoising, "transformer_pass", counted)
    return seen


def request(**settings: Any) -> VideoRequest:
    small = {"height": 64, "width": 64, "frames": 9, "steps": STEPS}
    return video_request("A red kite", settings=Ltx2Settings(variant="2.0", **small, **settings), size="tiny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pass_without_effect_is_left_out(passes: list[str], dtype: torch.dtype) -> None:
    components = tiny_components("2.0", dtype, perturbed_attn=False)
    expected = ours(components).run(request()).outputs["denoising.latents"]
    assert passes == ["text", "stg", "isolated"] * STEPS
    passes.clear()
    pipeline = ours(components, policy=SAVING)
    actual = pipeline.run(request()).outputs["denoising.latents"]
    assert passes == ["text", "isolated"] * STEPS
    for name in ("video", "audio"):
        mine, other = getattr(expected, name), getattr(actual, name)
        measured = float((mine - other).abs().max() / mine.abs().max())
        assert measured <= 16 * torch.finfo(dtype).eps, f"{name} differs by {measured:.1e}"
    without = ours(components).run(request(stg=0.0)).outputs["denoising.latents"]
    assert torch.equal(actual.video, without.video)
    assert torch.equal(actual.audio, without.audio)
    record = pipeline.record.stage("denoising")
    assert record.tier == "moved_rounding"
    assert record.sites[SiteOutcome("skip_ineffective_stg", fused=True)] == STEPS


def test_a_pass_with_effect_is_kept(passes: list[str]) -> None:
    components = tiny_components("2.0", perturbed_attn=True)
    pipeline = ours(components, policy=SAVING)
    actual = pipeline.run(request())
    assert passes == ["text", "stg", "isolated"] * STEPS
    assert actual.digests == ours(components).run(request()).digests
    record = pipeline.record.stage("denoising")
    why = "the transformer has perturbed attention"
    outcome = SiteOutcome("skip_ineffective_stg", False, Reason.UNSUPPORTED_INPUT, why)
    assert (record.tier, record.sites[outcome]) == ("exact", STEPS)


def test_a_request_without_such_guidance_is_exact() -> None:
    components = tiny_components("2.0", perturbed_attn=False)
    pipeline = ours(components, policy=SAVING)
    assert pipeline.run(request(stg=0.0)).digests == ours(components).run(request(stg=0.0)).digests
    record = pipeline.record.stage("denoising")
    assert (record.tier, record.sites) == ("exact", {})


def test_graphs_leave_the_pass_out_with_the_bits_that_this_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    components = tiny_components("2.0", perturbed_attn=False)
    expected = ours(components, policy=SAVING).run(request())
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    pipeline = ours(components, policy=replace(SAVING, enable_cuda_graph=True))
    assert pipeline.run(request()).digests == expected.digests
    pipeline.new_record()
    assert pipeline.run(request()).digests == expected.digests
    record = pipeline.record.stage("denoising")
    assert {outcome.kind for outcome in record.outcomes} == {Kind.REPLAYED}
    assert record.tier == "moved_rounding"
