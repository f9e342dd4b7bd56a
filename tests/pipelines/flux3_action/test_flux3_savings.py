"""FLUX 3 Action with savings: network passes left out or batched, results that differ by rounding alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from golden_pipeline import make_pipeline, observation, random_contexts
from torch import Tensor

import pipelines.pipeline
from accel.graphs.manifest import Manifest
from accel.graphs.recording import RecordingBackend
from accel.policy import AccelPolicy, Loop
from accel.record import Kind, Reason, SiteOutcome
from accel.runner import Runner
from pipelines.flux3_action.layers import Modulation
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.request import ActionResult
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.flux3_action.transformer import ActionTransformer

STEPS = 3
ACTION_UNGUIDED = Flux3Settings(steps=STEPS, guidance=4.0, guidance_action=1.0)
BOTH_GUIDED = Flux3Settings(steps=STEPS, guidance=4.0, guidance_action=2.0)
UNGUIDED = Flux3Settings(steps=STEPS, guidance=1.0, guidance_action=1.0)
# How far fp32 results may part by rounding alone, relative to the largest value.
BOUND = 32 * torch.finfo(torch.float32).eps
CONTEXTS = random_contexts("lift", "")
CONTEXTS["long"] = torch.cat([CONTEXTS["lift"], -CONTEXTS["lift"]], dim=1)

Make = Callable[..., Flux3ActionPipeline]


@pytest.fixture
def make(eager_policy: AccelPolicy) -> Make:
    """savings: those allowed. options: other fields of the policy."""

    def make(*savings: str, **options: object) -> Flux3ActionPipeline:
        policy = replace(eager_policy, fused=dict.fromkeys(savings, True), **options)
        return make_pipeline(contexts=CONTEXTS, policy=policy)

    return make


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch size of every joint pass, in order."""
    seen: list[int] = []
    joint = ActionTransformer.joint

    def counted(self: ActionTransformer, hidden: Tensor, modulation: Modulation, rope: Tensor) -> Tensor:
        seen.append(hidden.shape[0])
        return joint(self, hidden, modulation, rope)

    monkeypatch.setattr(ActionTransformer, "joint", counted)
    return seen


def run(pipeline: Flux3ActionPipeline, settings: Flux3Settings, prompt: str = "lift") -> ActionResult:
    return pipeline.run(pipeline.request(observation(prompt), seed=3, settings=settings))


def difference(expected: ActionResult, actual: ActionResult, output: str) -> float:
    """The largest, in units of the largest expected value."""
    mine, other = expected.outputs[output], actual.outputs[output]
    return float((mine - other).abs().max() / mine.abs().max())


def test_both_passes_of_a_step_are_one_batch(make: Make, rows: list[int]) -> None:
    expected, unguided = run(make(), BOTH_GUIDED), run(make(), UNGUIDED)
    assert rows == [1] * 3 * STEPS
    rows.clear()
    pipeline = make("batched_guidance")
    actual = run(pipeline, BOTH_GUIDED)
    assert rows == [2] * STEPS
    for output in ("denoising.video_tokens", "denoising.action_tokens"):
        measured = difference(expected, actual, output)
        assert measured <= BOUND, f"{output} differs by {measured:.1e}"
        assert difference(expected, unguided, output) > 1000 * BOUND
    record = pipeline.record.stage("denoising")
    assert record.tier == "moved_rounding"
    assert record.sites[SiteOutcome("batched_guidance", fused=True)] == STEPS


def test_captions_of_unequal_length_are_not_batched(make: Make, rows: list[int]) -> None:
    pipeline = make("batched_guidance")
    actual = run(pipeline, BOTH_GUIDED, "long")
    assert rows == [1] * 2 * STEPS
    assert actual.digests == run(make(), BOTH_GUIDED, "long").digests
    assert pipeline.record.stage("denoising").tier == "exact"
    assert pipeline.strict_violations() == [
        "denoising: reference (unsupported_input): batched_guidance: captions of 160 and 80 tokens"
    ]


def test_the_last_step_leaves_out_what_serves_the_video_alone(make: Make, rows: list[int]) -> None:
    expected, unguided = run(make(), ACTION_UNGUIDED), run(make(), UNGUIDED)
    assert rows == [1] * 3 * STEPS
    rows.clear()
    pipeline = make("skip_unused_guidance")
    actual = run(pipeline, ACTION_UNGUIDED)
    assert rows == [1] * (2 * STEPS - 1)
    measured = difference(expected, actual, "denoising.action_tokens")
    assert measured <= BOUND, f"actions differ by {measured:.1e}"
    # Earlier steps guide the video, which the actions follow.
    assert difference(expected, unguided, "denoising.action_tokens") > 100 * BOUND
    # The video is thrown away: its last step goes without guidance.
    assert not torch.equal(
        expected.outputs["denoising.video_tokens"], actual.outputs["denoising.video_tokens"]
    )
    record = pipeline.record.stage("denoising")
    assert record.tier == "moved_rounding"
    assert record.sites[SiteOutcome("skip_unused_guidance", fused=True)] == 1


def test_a_pass_that_guides_the_action_is_kept(make: Make, rows: list[int]) -> None:
    pipeline = make("skip_unused_guidance")
    actual = run(pipeline, BOTH_GUIDED)
    assert rows == [1] * 2 * STEPS
    assert actual.digests == run(make(), BOTH_GUIDED).digests
    record = pipeline.record.stage("denoising")
    why = "the action is guided at scale 2"
    outcome = SiteOutcome("skip_unused_guidance", False, Reason.UNSUPPORTED_INPUT, why)
    assert (record.tier, record.sites[outcome]) == ("exact", STEPS)


def test_the_savings_go_together(make: Make, rows: list[int]) -> None:
    run(make("batched_guidance", "skip_unused_guidance"), ACTION_UNGUIDED)
    assert rows == [2] * (STEPS - 1) + [1]


def test_without_guidance_nothing_is_saved(make: Make, rows: list[int]) -> None:
    pipeline = make("batched_guidance", "skip_unused_guidance")
    actual = run(pipeline, UNGUIDED)
    assert rows == [1] * STEPS
    assert actual.digests == run(make(), UNGUIDED).digests
    assert pipeline.record.stage("denoising").tier == "exact"
    assert pipeline.strict_violations() == []


@pytest.mark.parametrize("loop", ["step", "chain", "whole"])
def test_graphs_hold_the_savings_and_the_bits_that_they_give(
    make: Make, monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    savings = ("batched_guidance", "skip_unused_guidance")
    expected = run(make(*savings), ACTION_UNGUIDED)
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    pipeline = make(*savings, enable_cuda_graph=True, loop=loop)
    assert run(pipeline, ACTION_UNGUIDED).digests == expected.digests
    pipeline.new_record()
    assert run(pipeline, ACTION_UNGUIDED).digests == expected.digests
    record = pipeline.record.stage("denoising")
    assert {outcome.kind for outcome in record.outcomes} == {Kind.REPLAYED}
    assert record.tier == "moved_rounding"


def test_a_manifest_holds_the_last_step_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    earlier, later = (
        make("skip_unused_guidance", enable_cuda_graph=True, manifest="kept.json") for _ in range(2)
    )
    expected = run(earlier, ACTION_UNGUIDED)
    later.capture_manifest(Manifest().updated(earlier.used_signatures()))
    assert run(later, ACTION_UNGUIDED).digests == expected.digests
    record = later.record.stage("denoising")
    assert {outcome.kind for outcome in record.outcomes} == {Kind.REPLAYED}
    assert record.tier == "moved_rounding"
