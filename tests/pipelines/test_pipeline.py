"""Warm-up and manifest of a pipeline on the recording backend: what a second run has on its first call."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import pipelines.pipeline
from accel.graphs.manifest import Manifest
from accel.graphs.recording import RecordingBackend
from accel.loops import iterate
from accel.policy import AccelPolicy, StageOverride
from accel.record import Kind, Outcome, Reason
from accel.region import loop_body, region
from accel.runner import Runner
from pipelines.pipeline import Pipeline, PipelineDescription
from pipelines.progress import Progress
from stages.stage import Field, Stage, State

CPU = torch.device("cpu")
ORIGIN = {"torch": "this one"}


@dataclass(frozen=True)
class Hidden:
    tokens: Tensor
    scale: float


@dataclass(frozen=True)
class Carry:
    sample: Tensor
    before: Tensor | None = None


class Encoding(Stage):
    """`Hidden` of a text of n tokens."""

    name: ClassVar[str] = "encoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"),)
    writes: ClassVar[tuple[Field, ...]] = (Field("hidden"),)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4, bias=False).requires_grad_(False).eval()

    def modules(self) -> Mapping[str, nn.Module]:
        return {"net": self.net}

    def run(self, state: State) -> None:
        state["hidden"] = Hidden(self.encode(torch.linspace(0, 1, 4 * state["request"]).view(-1, 4)), 0.5)

    @region
    def encode(self, x: Tensor) -> Tensor:
        return self.net(x) * 2


class Denoising(Stage):
    """A loop of three steps whose carry changes its structure after the first."""

    name: ClassVar[str] = "denoising"
    reads: ClassVar[tuple[Field, ...]] = (Field("hidden"),)
    writes: ClassVar[tuple[Field, ...]] = (Field("sample"),)

    def run(self, state: State) -> None:
        steps = torch.linspace(1, 0, 3).unbind()
        sample = torch.zeros_like(state["hidden"].tokens)
        state["sample"] = iterate(self.advance, Carry(sample), steps, state["hidden"], gain=2.0).sample

    @loop_body("whole")
    def advance(self, carry: Carry, step: Tensor, shared: Hidden, *, gain: float) -> Carry:
        sample = carry.sample + step * gain * shared.scale * shared.tokens
        return Carry(sample if carry.before is None else sample + carry.before, carry.sample)


class Toy(Pipeline[int, Tensor]):
    def __init__(self, **policy: Any) -> None:
        settings: dict[str, Any] = dict(
            name="test", enable_cuda_graph=True, graph_mode="full", max_entries=4, max_segments=8,
            on_full="eager", strict=False, fused={}, stages={},
        )  # fmt: skip
        description = PipelineDescription(
            model="toy", size="tiny", size_reason="as asked", weights="none", device="cpu", dtype="float32",
            outputs_mean_nothing=True,
        )  # fmt: skip
        super().__init__(
            description=description,
            device=CPU,
            policy=AccelPolicy(**settings | policy),
            stages=(Encoding(), Denoising()),
            remake=lambda policy: Toy(**vars(policy)),
        )

    @property
    def outcomes(self) -> dict[str, dict[Outcome, int]]:
        return {name: dict(stage.outcomes) for name, stage in self.record.stages.items()}

    def request_from(self, config: Any) -> int:
        raise NotImplementedError

    def files(self, result: Tensor, *, config_hash: str) -> dict[str, bytes]:
        raise NotImplementedError

    def _begin(self, request: int, progress: Progress) -> State:
        return State(request=request, progress=progress)

    def _finish(self, state: State) -> Tensor:
        return state["sample"]


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> RecordingBackend:
    """Every pipeline of a test runs on this backend."""
    backend = RecordingBackend()
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=backend))
    return backend


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="samebit"):
        yield caplog


def eager(n: int) -> Tensor:
    return Toy(enable_cuda_graph=False).run(n)


def manifest_of(*requests: int, **policy: Any) -> Manifest:
    """What a first process would write after these requests."""
    first = Toy(**policy)
    for request in requests:
        first.run(request)
    return Manifest(origin=ORIGIN).updated(first.used_signatures())


REPLAYED = {Outcome(Kind.REPLAYED): 1}


def test_warm_up_serves_true_requests_and_explicit_capture_ends_with_it(backend: RecordingBackend) -> None:
    pipeline = Toy(capture="explicit")
    results = pipeline.warm_up([2, 3])
    assert all(torch.equal(result, eager(n)) for result, n in zip(results, (2, 3), strict=True))
    captures = backend.captures
    assert captures == 4
    pipeline.new_record()
    for n in (2, 3, 5):
        assert torch.equal(pipeline.run(n), eager(n))
    assert backend.captures == captures
    for outcomes in pipeline.outcomes.values():
        assert outcomes.pop(Outcome(Kind.REPLAYED)) == 2
        (missed,) = outcomes
        assert missed.reason == Reason.NOT_WARMED
        assert "shape" in missed.detail


def test_lazy_capture_goes_on_after_warm_up(backend: RecordingBackend) -> None:
    pipeline = Toy()
    pipeline.warm_up([2])
    pipeline.run(3)
    assert backend.captures == 4


@pytest.mark.parametrize("loop", ["step", "whole", "chain"])
def test_a_second_run_replays_from_its_first_call(backend: RecordingBackend, loop: str) -> None:
    manifest = manifest_of(2, 3, 2, loop=loop)
    second = Toy(loop=loop, capture="explicit")
    second.capture_manifest(manifest)
    captures = backend.captures
    for n in (2, 3):
        assert torch.equal(second.warm_up([n])[0], eager(n))
    assert backend.captures == captures
    for outcomes in second.outcomes.values():
        assert outcomes.keys() == {Outcome(Kind.REPLAYED)}


def test_counts_are_those_of_requests() -> None:
    manifest = manifest_of(2, 2, 3)
    assert sorted(used.count for used in manifest.signatures) == [1, 1, 2, 2]
    assert {used.stage for used in manifest.signatures} == {"encoding", "denoising"}
    second = Toy()
    second.capture_manifest(manifest)
    assert second.used_signatures() == []
    second.run(3)
    used = second.used_signatures()
    assert [(each.stage, each.count) for each in used] == [("encoding", 1), ("denoising", 1)]
    assert manifest.updated(used).signatures[0].count in (1, 2)
    assert {each.identity for each in used} < {each.identity for each in manifest.signatures}


def test_larger_graphs_are_captured_first(backend: RecordingBackend, monkeypatch) -> None:
    manifest = manifest_of(2, 9, 5)
    rows: list[int] = []
    encode = Encoding.encode

    @wraps(encode)
    def observed(self: Encoding, x: Tensor) -> Tensor:
        if not rows or rows[-1] != len(x):
            rows.append(len(x))
        return encode(self, x)

    monkeypatch.setattr(Encoding, "encode", observed)
    Toy().capture_manifest(manifest)
    assert rows == [9, 5, 2]


def test_no_more_are_captured_than_may_live(backend: RecordingBackend) -> None:
    manifest = manifest_of(2, 3, 4)
    Toy(max_entries=2).capture_manifest(manifest)
    assert backend.captures == 6 + 4


def test_a_stage_gets_all_of_its_graphs_or_none(backend: RecordingBackend, said) -> None:
    manifest = manifest_of(2, 9)
    encodings = (used for used in manifest.signatures if used.stage == "encoding")
    small = min(encodings, key=lambda used: used.bytes)
    broken = replace(small, arguments={"x": "no tensor"})
    signatures = tuple(broken if used == small else used for used in manifest.signatures)
    before = backend.captures
    second = Toy()
    second.capture_manifest(replace(manifest, signatures=signatures))
    assert backend.captures == before + 3
    assert "encoding: no graphs from the manifest: encoding.encode: " in said.text
    assert "denoising: 2 graphs captured from the manifest" in said.text
    assert torch.equal(second.run(9), eager(9))
    assert second.outcomes == {"encoding": {Outcome(Kind.CAPTURED): 1}, "denoising": REPLAYED}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stage": "nowhere"}, "nowhere.encode: skipped in the manifest: no such region"),
        ({"region": "nothing"}, "encoding.nothing: skipped in the manifest: no such region"),
        ({"arguments": {}}, r"encoding.encode: skipped in the manifest: takes ['x'], not []"),
        ({"arguments": {"x": {"dataclass": ["os.system", {}]}}}, "no value can be made from"),
        ({"arguments": {"x": "text"}}, "encoding: no graphs from the manifest: encoding.encode: "),
    ],
)
def test_what_means_nothing_is_skipped_by_name(said, change: dict[str, Any], why: str) -> None:
    (used,) = (used for used in manifest_of(2).signatures if used.stage == "encoding")
    pipeline = Toy()
    pipeline.capture_manifest(Manifest(origin=ORIGIN, signatures=(replace(used, **change),)))
    assert why in said.text
    assert torch.equal(pipeline.run(2), eager(2))
    assert pipeline.outcomes["encoding"] == {Outcome(Kind.CAPTURED): 1}


def test_without_graphs_a_manifest_is_empty_and_captures_nothing(said) -> None:
    off = Toy(stages={"encoding": StageOverride(enable_cuda_graph=False)})
    off.capture_manifest(manifest_of(2))
    assert "encoding.encode: skipped in the manifest" in said.text
    off.run(2)
    assert {used.stage for used in off.used_signatures()} == {"denoising"}
    plain = Toy(enable_cuda_graph=False)
    plain.run(2)
    assert plain.used_signatures() == []


def test_memory_and_times_are_written_down() -> None:
    signatures = manifest_of(2, 2).signatures
    assert {used.stage for used in signatures} == {"encoding", "denoising"}
    for used in signatures:
        assert used.bytes > 0
        assert used.ms_eager > 0
        assert used.ms_graph > 0


def test_requests_of_several_threads_wait_for_each_other(monkeypatch) -> None:
    pipeline, busy, clashes = Toy(), threading.Lock(), []
    run = Encoding.run

    def alone(self: Encoding, state: State) -> None:
        if not busy.acquire(blocking=False):
            clashes.append(state["request"])
            return run(self, state)
        try:
            time.sleep(0.005)
            return run(self, state)
        finally:
            busy.release()

    monkeypatch.setattr(Encoding, "run", alone)
    requests = [2, 3, 4, 5] * 4
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(pipeline.run, requests))
    assert clashes == []
    assert all(torch.equal(result, eager(n)) for result, n in zip(results, requests, strict=True))


def test_autocast_and_gradients_of_the_caller_change_nothing() -> None:
    expected = eager(3)
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        result = Toy(enable_cuda_graph=False).run(3)
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)


def test_refresh_lets_every_stage_forget_without_a_new_capture(
    backend: RecordingBackend, monkeypatch
) -> None:
    pipeline, forgotten = Toy(), []
    for stage in (Encoding, Denoising):
        monkeypatch.setattr(stage, "forget", lambda self: forgotten.append(self.name))
    pipeline.run(2)
    captures = backend.captures
    pipeline.stages[0].net.weight.mul_(2)
    pipeline.refresh()
    assert forgotten == ["encoding", "denoising"]
    assert torch.equal(pipeline.run(2), 2 * eager(2))
    assert backend.captures == captures


def test_a_closed_pipeline_holds_nothing_and_runs_again() -> None:
    pipeline = Toy()
    pipeline.run(2)
    pipeline.close()
    assert pipeline.used_signatures() == []
    assert torch.equal(pipeline.run(2), eager(2))
