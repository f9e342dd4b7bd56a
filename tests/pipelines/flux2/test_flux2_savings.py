"""FLUX.2 base variants with both guidance passes of a step as one batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_flux2 import CPU, make_components
from torch import Tensor

import pipelines.pipeline
from accel.graphs.recording import RecordingBackend
from accel.policy import AccelPolicy
from accel.record import Kind, SiteOutcome
from accel.runner import Runner
from pipelines.flux2 import denoising
from pipelines.flux2.images import reference_from
from pipelines.flux2.pipeline import Flux2Pipeline
from pipelines.flux2.request import ImageRequest
from pipelines.pipeline import Placement

STEPS = 2
REQUEST = ImageRequest(prompt="a cat", seed=7, height=32, width=48, steps=STEPS, guidance=3.0, images=2)
UNGUIDED = replace(REQUEST, guidance=1.0)


def make(policy: AccelPolicy, **changes: Any) -> Flux2Pipeline:
    components, _ = make_components("4b-base", torch.float32, CPU)
    return Flux2Pipeline(
        components,
        model="flux2_klein",
        policy=replace(policy, **changes),
        placement=Placement(device=CPU, dtype=torch.float32, size="tiny", size_reason="a test"),
        outputs_mean_nothing=True,
    )


BATCHED = {"fused": {"batched_guidance": True}}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch size of every pass of the transformer, in order."""
    seen: list[int] = []
    predict = denoising.predict

    def counted(transformer: Any, tokens: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.append(tokens.shape[0])
        return predict(transformer, tokens, *args, **options)

    monkeypatch.setattr(denoising, "predict", counted)
    return seen


@pytest.mark.parametrize("with_image", [False, True])
def test_both_passes_of_a_step_are_one_batch(
    eager_policy: AccelPolicy, rows: list[int], with_image: bool
) -> None:
    picture = reference_from(Image.radial_gradient("L").convert("RGB"), name="image")
    request = replace(REQUEST, references=(picture,) if with_image else ())
    eager = make(eager_policy)
    expected = eager.run(request).outputs["denoising.latents"]
    assert rows == [2] * 2 * STEPS
    unguided = eager.run(replace(request, guidance=1.0)).outputs["denoising.latents"]
    rows.clear()
    pipeline = make(eager_policy, **BATCHED)
    actual = pipeline.run(request).outputs["denoising.latents"]
    assert rows == [4] * STEPS
    measured = float((expected - actual).abs().max() / expected.abs().max())
    bound = 32 * torch.finfo(torch.float32).eps
    assert measured <= bound, f"latents differ by {measured:.1e}"
    assert float((expected - unguided).abs().max() / expected.abs().max()) > 1000 * bound
    record = pipeline.record.stage("denoising")
    assert record.tier == "moved_rounding"
    assert record.sites[SiteOutcome("batched_guidance", fused=True)] == STEPS


def test_without_guidance_there_is_one_pass_and_every_bit(eager_policy: AccelPolicy, rows: list[int]) -> None:
    pipeline = make(eager_policy, **BATCHED)
    assert pipeline.run(UNGUIDED).digests == make(eager_policy).run(UNGUIDED).digests
    assert rows == [2] * 2 * STEPS
    assert pipeline.record.stage("denoising").tier == "exact"


@pytest.mark.parametrize("loop", ["step", "chain", "whole"])
def test_graphs_hold_the_batch_and_the_bits_that_it_gives(
    eager_policy: AccelPolicy, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    expected = make(eager_policy, **BATCHED).run(REQUEST)
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    pipeline = make(eager_policy, enable_cuda_graph=True, loop=loop, **BATCHED)
    assert pipeline.run(REQUEST).digests == expected.digests
    pipeline.new_record()
    assert pipeline.run(REQUEST).digests == expected.digests
    record = pipeline.record.stage("denoising")
    assert {outcome.kind for outcome in record.outcomes} == {Kind.REPLAYED}
    assert record.tier == "moved_rounding"
