"""Stages bound to policies: what runs, what is recorded, what strict mode reports."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.errors import ConfigError
from accel.fusion import swiglu
from accel.graphs.recording import RecordingBackend
from accel.policy import AccelPolicy, StageOverride
from accel.record import Kind, Outcome, Reason
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
            with runner.stage(stage.name):
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
    fresh = runner.new_record()
    with torch.no_grad():
        stage.step(torch.ones(1, 3, 4))
    record = fresh.stage("denoising")
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
    assert any(line.startswith("denoising: reference (no_cuda)") for line in lines)


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


def test_a_stage_that_raises_is_not_timed() -> None:
    runner = Runner(policy(), device=CPU)
    with pytest.raises(ValueError, match="broken"), runner.stage("denoising"):
        raise ValueError("broken")
    assert "denoising" not in runner.record.stages


def test_a_mode_that_is_not_there_is_refused_by_name() -> None:
    runner = Runner(policy(graph_mode="segmented"), device=CPU)
    with pytest.raises(ConfigError, match=r"graph_mode=segmented .*'denoising'.*full"):
        runner.bind(Toy())


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
