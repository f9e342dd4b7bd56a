"""The pipeline around its stages: what a request may ask, what a result owns, and what is kept between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from golden_pipeline import CONFIG, make_pipeline, observation, random_contexts, scale_weights

import accel.fusion.gate
import pipelines.pipeline
from accel.errors import ConfigError, ObservationError
from accel.graphs.recording import RecordingBackend
from accel.policy import AccelPolicy
from accel.record import Kind
from accel.runner import Runner
from pipelines.flux3_action.denoising import Denoising
from pipelines.flux3_action.pipeline import Flux3ActionPipeline, load
from pipelines.flux3_action.request import ActionRequest, ActionResult
from pipelines.flux3_action.settings import Flux3Settings, ObservationSource
from pipelines.flux3_action.stages import TextEncoding
from pipelines.pipeline import Placement
from pipelines.weights_config import WeightsConfig

FAST = Flux3Settings(steps=1, guidance=1.0, guidance_action=1.0)
LONG = "lift the red cube, and then ..."
CONTEXTS = random_contexts("lift", "open", "", LONG)


@pytest.fixture
def pipeline(eager_policy: AccelPolicy) -> Flux3ActionPipeline:
    return make_pipeline(contexts=CONTEXTS, policy=eager_policy)


def run(pipeline: Flux3ActionPipeline, prompt: str = "lift", settings: Flux3Settings = FAST) -> ActionResult:
    return pipeline.run(pipeline.request(observation(prompt), seed=3, settings=settings))


# Requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 2**64),
        ("seed", 1.5),
        ("seed", True),
        ("steps", 0),
        ("steps", 2.5),
        ("steps", True),
        ("shift", 0.0),
        ("shift", float("nan")),
        ("shift", "5"),
        ("guidance_video", -3.0),
        ("guidance_video", True),
        ("guidance_video", float("inf")),
        ("guidance_action", -1),
        ("guidance_action", None),
        ("horizon", 0),
        ("horizon", -1),
        ("horizon", 1.0),
        ("sampler", "unipc"),
    ],
)
def test_no_request_can_hold_a_bad_number(pipeline: Flux3ActionPipeline, field: str, value: Any) -> None:
    request = pipeline.request(observation(), settings=FAST)
    with pytest.raises(ConfigError, match=field):
        replace(request, **{field: value})


@pytest.mark.parametrize(
    ("seed", "settings", "named"),
    [
        (-1, {}, "seed=-1"),
        (2**64, {}, f"seed={2**64}"),
        (0, {"steps": 0}, "steps=0"),
        (0, {"steps": 2.5}, "steps=2.5"),
        (0, {"horizon": 9}, r"horizon=9.*1\.\.8"),
        (0, {"horizon": 0}, "horizon=0"),
        (0, {"guidance": -1.0}, "guidance_video=-1.0"),
        (0, {"guidance": True}, "guidance_video=True"),
        (0, {"shift": 0.0}, "shift=0.0"),
        (0, {"shift": 1e6}, "sampler_shift 1000000.0"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name_before_any_work(
    pipeline: Flux3ActionPipeline, seed: int, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        pipeline.request(observation(), seed=seed, settings=Flux3Settings(**settings))


def test_whole_numbers_will_do_as_scales(pipeline: Flux3ActionPipeline) -> None:
    assert not pipeline.request(observation(), settings=replace(FAST, guidance=1)).guided


def test_a_horizon_beyond_this_policy_is_refused_even_in_a_foreign_request(
    pipeline: Flux3ActionPipeline,
) -> None:
    request = replace(pipeline.request(observation(), settings=FAST), horizon=99)
    with pytest.raises(ConfigError, match="horizon=99"):
        pipeline.run(request)


@pytest.mark.parametrize("shape", [(7,), (9,), (1, 8)])
def test_a_state_of_another_shape_is_refused(pipeline: Flux3ActionPipeline, shape: tuple[int, ...]) -> None:
    wrong = replace(observation(), state=torch.zeros(shape))
    with pytest.raises(ObservationError, match="state"):
        pipeline.request(wrong, settings=FAST)
    request = replace(pipeline.request(observation(), settings=FAST), observation=wrong)
    with pytest.raises(ObservationError, match="state"):
        pipeline.run(request)


@pytest.mark.parametrize("horizon", [1, CONFIG.chunk_size])
def test_horizon_is_the_number_of_actions_returned(pipeline: Flux3ActionPipeline, horizon: int) -> None:
    whole = run(pipeline).actions
    part = run(pipeline, settings=replace(FAST, horizon=horizon)).actions
    assert np.array_equal(part, whole[:horizon])
    assert len(part) == horizon


# Results


@contextmanager
def default_dtype_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "state", [default_dtype_float64, lambda: torch.device("meta")], ids=["float64", "meta"]
)
def test_defaults_of_the_caller_do_not_move_the_actions(
    pipeline: Flux3ActionPipeline, state: Callable[[], Any]
) -> None:
    settings = replace(FAST, steps=4, guidance=4.0)
    expected = run(pipeline, settings=settings)
    pipeline.refresh()
    with state():
        result = run(pipeline, settings=settings)
    assert result.digests == expected.digests


def test_a_pipeline_made_under_another_default_dtype_is_the_same(eager_policy: AccelPolicy) -> None:
    expected = run(make_pipeline(contexts=CONTEXTS, policy=eager_policy))
    with default_dtype_float64():
        result = run(make_pipeline(contexts=CONTEXTS, policy=eager_policy))
    assert result.digests == expected.digests


def test_a_result_shares_no_memory(pipeline: Flux3ActionPipeline) -> None:
    request = pipeline.request(observation(), settings=FAST)
    result, again = pipeline.run(request), pipeline.run(request)
    for array in (result.state, result.actions):
        array[:] = 7
    with pytest.raises(ValueError, match="read-only"):
        result.canvas[:] = 7
    assert request.observation.state.max() < 1
    assert result.digests == again.digests


@pytest.mark.parametrize("cache_tokens", [0, 65536])
def test_every_request_with_a_cut_prompt_says_so(eager_policy: AccelPolicy, cache_tokens: int) -> None:
    pipeline = make_pipeline(contexts=CONTEXTS, policy=eager_policy, caption_cache_tokens=cache_tokens)
    for _ in range(2):
        (note,) = run(pipeline, LONG).notes
        assert "prompt" in note
    assert run(pipeline).notes == ()


# What is kept between requests


@pytest.mark.parametrize("graphs", [False, True])
def test_after_weights_changed_in_place_nothing_old_is_left(
    eager_policy: AccelPolicy, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Graphs go on: they read weights and tables by address."""
    settings = replace(FAST, steps=2, guidance=4.0)
    with monkeypatch.context() as patch:
        patch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
        policy = replace(eager_policy, enable_cuda_graph=graphs)
        pipeline = make_pipeline(contexts=CONTEXTS, policy=policy)
    before = run(pipeline, settings=settings)
    components = {name: module for stage in pipeline.stages for name, module in stage.modules().items()}
    for name in ("transformer", "vae"):
        scale_weights(components[name], 0.75)
    pipeline.refresh()
    pipeline.new_record()
    record = pipeline.record
    fresh = make_pipeline(contexts=CONTEXTS, policy=eager_policy, weight_scale=0.75)
    after, expected = run(pipeline, settings=settings), run(fresh, settings=settings)
    assert after.digests == expected.digests
    assert before.digests["text_encoding.text"] != after.digests["text_encoding.text"]
    if graphs:
        for stage in ("observation_encoding", "denoising"):
            assert {outcome.kind for outcome in record.stage(stage).outcomes} == {Kind.REPLAYED}


def test_captions_made_by_a_kernel_that_was_switched_off_are_dropped(
    pipeline: Flux3ActionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = pipeline.stages[0]
    assert isinstance(text, TextEncoding)
    for hits in (0, 1):
        run(pipeline)
        assert text.cache.hits == hits
    monkeypatch.setattr(accel.fusion.gate, "_epoch", SimpleNamespace(value=1 << 20))
    run(pipeline)
    assert (text.cache.hits, text.cache.misses) == (1, 2)
    run(pipeline)
    assert text.cache.hits == 2


def denoising_of(pipeline: Flux3ActionPipeline) -> Denoising:
    (denoising,) = (stage for stage in pipeline.stages if isinstance(stage, Denoising))
    return denoising


def asking(pipeline: Flux3ActionPipeline, **settings: Any) -> ActionRequest:
    return pipeline.request(observation(), settings=Flux3Settings(**settings))


@pytest.mark.parametrize("other", [{"shift": 3.0}, {"steps": 3}, {"sampler": "euler"}])
def test_steps_of_a_request_depend_on_all_that_it_chooses(
    pipeline: Flux3ActionPipeline, other: dict[str, Any]
) -> None:
    denoising = denoising_of(pipeline)
    one = {"shift": 5.0, "steps": 2, "sampler": "cosmos_unipc"}
    first = denoising.steps(asking(pipeline, **one))
    assert denoising.steps(asking(pipeline, **one))[0] is first[0]
    second = denoising.steps(asking(pipeline, **(one | other)))
    assert len(second) != len(first) or not torch.equal(
        second[1].solver.coefficients, first[1].solver.coefficients
    )


def test_a_client_that_sweeps_the_shift_does_not_fill_the_memory(pipeline: Flux3ActionPipeline) -> None:
    denoising = denoising_of(pipeline)
    first = denoising.steps(asking(pipeline, shift=1.0))
    for n in range(2, 2 + denoising.max_plans):
        denoising.steps(asking(pipeline, shift=float(n)))
    assert denoising.steps(asking(pipeline, shift=1.0))[0] is not first[0]


# Configuration


def config_of(source: ObservationSource, **changes: Any) -> Any:
    fields: dict[str, Any] = dict(
        model=Flux3Settings(), weights=WeightsConfig(kind="local", path="no such package"), seed=None,
        prompt=None, observation=source,
    )  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def test_a_missing_episode_shows_before_any_weights_are_read() -> None:
    placement = Placement(
        device=torch.device("cpu"), dtype=torch.float32, size="full", size_reason="weights are given"
    )
    with pytest.raises(ObservationError, match=r"no such episode.*can't be read"):
        load(config_of(ObservationSource(episode="no such episode")), placement=placement)


@pytest.mark.parametrize(("prompt", "expected"), [(None, "open"), ("lift", "lift")])
def test_the_prompt_of_the_observation_counts_unless_one_is_set(
    pipeline: Flux3ActionPipeline, tmp_path: Any, prompt: str | None, expected: str
) -> None:
    file = tmp_path / "observation.npz"
    np.savez(file, cam=np.zeros((160, 192, 3), np.uint8), state=np.zeros(8), prompt=np.array("open"))
    source = ObservationSource(npz=str(file))
    request = pipeline.request_from(config_of(source, model=FAST, prompt=prompt))
    assert request.observation.prompt == expected


def test_another_policy_on_the_same_weights(pipeline: Flux3ActionPipeline, eager_policy: AccelPolicy) -> None:
    """Both serve in turn, and neither's graphs or caches are the other's."""
    other = pipeline.with_policy(replace(eager_policy, name="other"))
    assert isinstance(other, Flux3ActionPipeline)
    assert run(pipeline).digests == run(other).digests == run(pipeline).digests
    own, others = (
        {name: module for stage in each.stages for name, module in stage.modules().items()}
        for each in (pipeline, other)
    )
    assert own["transformer"] is others["transformer"]
    assert not {id(stage) for stage in pipeline.stages} & {id(stage) for stage in other.stages}
    assert other.record.stage("denoising").cold_ms is not None
    assert pipeline.record.stage("denoising").walls_ms
