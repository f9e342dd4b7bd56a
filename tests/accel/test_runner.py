"""Stages bound to policies: what runs, what is recorded, what strict mode reports."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.fusion import swiglu
from accel.graphs.recording import RecordingBackend
from accel.policy import AccelPolicy, StageOverride
from accel.record import MAX_DETAILS, MAX_WALLS, Kind, Outcome, Reason, SiteOutcome, StageRecord
from accel.region import region
from accel.runner import Runner

CPU = torch.device("cpu")


class Toy:
    """A stage with two regions, one of which calls a fusion site."""

    def __init__(self, name: str = "denoising") -> None:
        self.name = name
        self.net = nn.Linear(4, 8, bias=False).requires_grad_(False).eval()

    def modules(self) -> Mapping[str, nn.Module]:
        return {"net": self.net}

    def mounts(self, allowed: frozenset[str]) -> tuple[()]:
        return ()

    @region
    def step(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Doc of step."""
        return swiglu(self.net(x)) * scale

    @region
    def head(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x + 1}


def policy(**changes: Any) -> AccelPolicy:
    settings: dict[str, Any] = dict(
        name="test", enable_cuda_graph=True, graph_mode="full", max_entries=4, max_segments=8,
        on_full="eager", strict=False, fused={"swiglu": True}, stages={},
    )  # fmt: skip
    return AccelPolicy(**settings | changes)


def run_twice(runner: Runner, stage: Toy) -> list[Tensor]:
    runner.bind(stage)
    x, results = torch.ones(1, 3, 4), []
    with torch.no_grad():
        for i in range(2):
            with runner.request(), runner.stage(stage.name):
                results += [stage.step(x * (i + 1)), stage.head(x * (i + 1))["y"]]
    return results


def expected(stage: Toy) -> list[Tensor]:
    x = torch.ones(1, 3, 4)
    plain = type(stage)
    with torch.no_grad():
        return [t for i in (1, 2) for t in (plain.step(stage, x * i), plain.head(stage, x * i)["y"])]


def test_graphs_give_eager_values_and_are_recorded() -> None:
    stage, runner = Toy(), Runner(policy(), device=CPU, backend=RecordingBackend())
    assert all(map(torch.equal, run_twice(runner, stage), expected(stage)))
    record = runner.record.stage("denoising")
    assert record.outcomes == {Outcome(Kind.CAPTURED): 2, Outcome(Kind.REPLAYED): 2}
    assert record.cold_ms is not None
    assert len(record.walls_ms) == 1
    assert record.capture_ms > 0
    assert record.extra_bytes > 0
    assert record.sites  # sites spoke up while warming and capturing, not on replays
    assert stage.step.__doc__ == "Doc of step."


def test_a_new_record_starts_from_zero_with_graphs_kept() -> None:
    stage, runner = Toy(), Runner(policy(), device=CPU, backend=RecordingBackend())
    run_twice(runner, stage)
    runner.new_record()
    with torch.no_grad():
        stage.step(torch.ones(1, 3, 4))
    record = runner.record.stage("denoising")
    assert record.outcomes == {Outcome(Kind.REPLAYED): 1}
    assert record.capture_ms == 0
    assert record.extra_bytes > 0
    runner.close()
    with torch.no_grad():
        stage.step(torch.ones(1, 3, 4))
    assert record.outcomes[Outcome(Kind.CAPTURED)] == 1


def test_without_cuda_every_region_says_so_and_strict_mode_minds() -> None:
    stage, runner = Toy(), Runner(policy(), device=CPU)
    assert all(map(torch.equal, run_twice(runner, stage), expected(stage)))
    record = runner.record.stage("denoising")
    assert record.outcomes == {Outcome(Kind.EAGER, Reason.NO_CUDA): 4}
    assert {site.reason for site in record.sites} == {Reason.NO_CUDA}
    lines = runner.strict_violations()
    assert "denoising: eager (no_cuda)" in lines
    assert any(line.startswith("denoising: reference (no_cuda): ") for line in lines)  # the site follows
    assert len(lines) == 2


def test_what_was_switched_off_is_planned() -> None:
    off = {"denoising": StageOverride(enable_cuda_graph=False, fused={"swiglu": False})}
    stage, runner = Toy(), Runner(policy(stages=off), device=CPU, backend=RecordingBackend())
    run_twice(runner, stage)
    record = runner.record.stage("denoising")
    assert record.outcomes == {Outcome(Kind.EAGER, Reason.DISABLED): 4}
    assert {site.reason for site in record.sites} == {Reason.DISABLED}
    assert runner.strict_violations() == []


def test_eager_for_a_reason_is_a_violation_with_its_detail() -> None:
    stage, runner = Toy(), Runner(policy(fused={}), device=CPU, backend=RecordingBackend())
    runner.bind(stage)
    stage.net.train()
    with torch.no_grad():
        stage.step(torch.ones(1, 3, 4))
    assert runner.strict_violations() == ["denoising: eager (training_mode): net"]


def test_two_stages_and_two_objects_do_not_mix() -> None:
    runner = Runner(policy(), device=CPU, backend=RecordingBackend())
    first, second = Toy("a"), Toy("b")
    results = run_twice(runner, first) + run_twice(runner, second)
    assert all(map(torch.equal, results, expected(first) + expected(second)))
    assert set(runner.record.stages) == {"a", "b"}
    untouched = Toy("a")
    with torch.no_grad():
        untouched.step(torch.ones(1, 3, 4))
    assert runner.record.stage("a").outcomes.total() == 4


def test_no_stage_of_a_request_that_raises_is_timed() -> None:
    runner = Runner(policy(), device=CPU)

    def broken_request() -> None:
        with runner.request():
            with runner.stage("vae"):
                pass
            with runner.stage("denoising"):
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken_request()
    assert not runner.record.stages
    with runner.request(), runner.stage("denoising"):
        pass
    assert set(runner.record.stages) == {"denoising"}


def test_the_times_kept_of_a_stage_are_bounded() -> None:
    record = StageRecord("denoising")
    for ms in range(MAX_WALLS + 3):
        record.add_wall(float(ms))
    assert record.cold_ms == 0
    assert len(record.walls_ms) == MAX_WALLS
    assert record.walls_ms[-1] == MAX_WALLS + 2


class Waiting(Toy):
    """Its step looks at a number on the host."""

    @region
    def step(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + 1 if (x.sum() > 0).item() else x - 1


@torch.no_grad()
def test_segmented_graphs_break_where_full_ones_run_eager() -> None:
    segmented = {"segmented": StageOverride(graph_mode="segmented")}
    runner = Runner(policy(stages=segmented), device=CPU, backend=RecordingBackend())
    for name in ("full", "segmented"):
        stage = Waiting(name)
        runner.bind(stage)
        for factor in (1, 2):
            x = torch.full((1, 3, 4), 0.5 * factor)
            assert torch.equal(stage.step(x), x + 1)
    full, broken = runner.record.stage("full"), runner.record.stage("segmented")
    assert {outcome.reason for outcome in full.outcomes} == {Reason.CAPTURE_FAILED, Reason.BLOCKED_SIGNATURE}
    assert full.breaks == []
    assert broken.outcomes[Outcome(Kind.CAPTURED)] == 1
    assert len(broken.breaks) == 1
    assert broken.breaks[0].startswith("test_runner.py:")


@torch.no_grad()
def test_the_breaks_of_the_record_are_those_of_live_graphs() -> None:
    """Weights that a server exchanges now and then make new graphs in the place of old ones."""
    stage, runner = Waiting(), Runner(policy(graph_mode="segmented"), device=CPU, backend=RecordingBackend())
    runner.bind(stage)
    for _ in range(3):
        stage.net.weight = nn.Parameter(torch.ones(8, 4), requires_grad=False)
        stage.step(torch.ones(1, 3, 4))
        assert len(runner.record.stage("denoising").breaks) == 1
    assert runner.record.stage("denoising").outcomes == {Outcome(Kind.CAPTURED): 3}


def test_the_details_kept_of_a_stage_are_bounded() -> None:
    record = StageRecord("denoising")
    for i in range(1000):
        record.count(Outcome(Kind.EAGER, Reason.OOM, f"{i} MiB are free"))
        record.count(SiteOutcome("swiglu", False, Reason.UNSUPPORTED_INPUT, f"{i} rows"))
    for counter in (record.outcomes, record.sites):
        assert sum(counter.values()) == 1000
        assert len(counter) == MAX_DETAILS + 1


@torch.no_grad()
def test_explicit_capture_ends_with_the_warm_up() -> None:
    lazy = {"lazy": StageOverride(capture="lazy")}
    runner = Runner(policy(capture="explicit", stages=lazy), device=CPU, backend=RecordingBackend())
    for name in ("explicit", "lazy"):
        stage = Toy(name)
        runner.bind(stage)
        stage.head(torch.ones(2))
        runner.finish_warm_up()
        for n in (2, 3):
            assert torch.equal(stage.head(torch.ones(n))["y"], torch.full((n,), 2.0))
    warm, late = Outcome(Kind.CAPTURED), Outcome(Kind.REPLAYED)
    assert runner.record.stage("lazy").outcomes == {warm: 2, late: 1}
    missed = [o for o in runner.record.stage("explicit").outcomes if o.kind is Kind.EAGER]
    assert [outcome.reason for outcome in missed] == [Reason.NOT_WARMED]
    assert "shape (3,) vs (2,)" in missed[0].detail


@torch.no_grad()
def test_the_record_tells_live_graphs_and_evictions_since_it_began() -> None:
    stage = Toy()
    runner = Runner(policy(max_entries=1, on_full="evict"), device=CPU, backend=RecordingBackend())
    runner.bind(stage)
    for n in (1, 2, 1):
        stage.head(torch.ones(n))
    assert (runner.record.stage("denoising").entries, runner.record.stage("denoising").evictions) == (1, 2)
    runner.new_record()
    stage.head(torch.ones(1))
    fresh = runner.record.stage("denoising")
    assert (fresh.entries, fresh.evictions) == (1, 0)


def test_threads_that_share_a_stage_get_their_own_values() -> None:
    stage, runner = Toy(), Runner(policy(), device=CPU, backend=RecordingBackend())
    runner.bind(stage)
    wrong: list[float] = []

    @torch.no_grad()
    def work(start: float) -> None:
        for i in range(50):
            value = start + i
            if not stage.head(torch.full((4,), value))["y"].eq(value + 1).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(1000.0 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert runner.record.stage("denoising").outcomes == {
        Outcome(Kind.CAPTURED): 1,
        Outcome(Kind.REPLAYED): 149,
    }
