"""Graphs in bounded memory: budgets, eviction, running out, and the account of it all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_harness import Harness, X
from torch import Tensor

from accel.graphs.cache import MemoryBudget
from accel.graphs.recording import RecordedGraph, RecordingBackend
from accel.record import Kind, Reason

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def doubled(x: Tensor) -> Tensor:
    return x * 2


def mib(n: int) -> Tensor:
    return torch.ones(n, MIB // 4)


def test_a_graph_over_budget_is_dropped_and_the_others_serve_on() -> None:
    run = Harness(doubled, memory_budget_mb=3)
    for n, kind in (
        (1, Kind.CAPTURED),
        (2, Kind.CAPTURED),
        (4, Kind.EAGER),
        (4, Kind.EAGER),
        (2, Kind.REPLAYED),
    ):
        x = mib(n)
        assert torch.equal(run(x), x * 2)
        assert run.outcome.kind is kind
        assert run.graph.extra_bytes == run.backend.reserved_bytes() <= 3 * MIB
        if n == 4:
            assert "graphs would hold 7.0 MiB of 3 MiB" in run.outcome.detail
    stats = run.graph.stats()
    assert (stats.captures, stats.failures, run.backend.captures) == (2, 1, 3)
    assert stats.blocked == ("eager (over_budget): graphs would hold 7.0 MiB of 3 MiB",)


def test_regions_share_the_budget_of_their_stage() -> None:
    budget, backend = MemoryBudget(3), RecordingBackend()
    first, second = (Harness(doubled, backend=backend, options={"budget": budget}) for _ in range(2))
    first(mib(2))
    second(mib(2))
    assert second.outcome.reason is Reason.OVER_BUDGET
    first.graph.close()
    assert budget.held == 0
    second(mib(3))
    assert second.outcome.kind is Kind.CAPTURED


def test_when_eager_runs_out_of_memory_the_graphs_make_room() -> None:
    run, draws = Harness(lambda x: noisy(x), max_entries=1), []

    def noisy(x: Tensor) -> Tensor:
        value = x + torch.randn_like(x)
        if x.shape[0] == 8 and len(run.graph):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return value

    run(torch.ones(2))
    for fn in (run, lambda x: x + torch.randn_like(x)):
        torch.manual_seed(3)
        draws.append((fn(torch.ones(8)), torch.randn(2)))
    assert all(map(torch.equal, *draws))
    assert run.outcome.reason is Reason.OOM
    assert (len(run.graph), run.backend.reserved_bytes()) == (0, 0)


def test_without_room_for_the_results_a_call_runs_eager_on_the_same_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    run = Harness(lambda x: x + torch.randn_like(x))
    run(X)
    torch.manual_seed(3)
    expected = X + torch.randn_like(X)
    torch.manual_seed(3)
    with monkeypatch.context() as patch:
        patch.setattr("torch.empty_strided", full)
        assert torch.equal(run(X), expected)
    assert run.outcome.reason is Reason.OOM
    assert "CUDA out of memory. Tried to allocate 2.00 GiB." in run.outcome.detail
    run(X)
    assert run.outcome.kind is Kind.REPLAYED


def test_out_of_memory_in_a_capture_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(graph: RecordedGraph) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    run = Harness(doubled)
    run(torch.ones(2))
    with monkeypatch.context() as patch:
        patch.setattr(RecordedGraph, "replay", no_room)
        assert torch.equal(run(torch.ones(4)), torch.full((4,), 2.0))
    assert run.outcome.reason is Reason.OOM
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    assert run.outcome.kind is Kind.REPLAYED
    assert run.backend.reserved_bytes() == run.graph.extra_bytes == 8


def test_evicted_graphs_are_destroyed_with_all_they_held(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[RecordedGraph] = []
    release = RecordedGraph.release

    def noted(graph: RecordedGraph) -> None:
        released.append(graph)
        release(graph)

    monkeypatch.setattr(RecordedGraph, "release", noted)
    run = Harness(doubled, max_entries=2, on_full="evict")
    buffers = []
    for n in (1, 2, 3, 4):
        run(torch.ones(n))
        buffers.append(weakref.ref(run.graph._cache.entries()[-1].inputs.buffers[0]))
    gc.collect()
    assert [buffer() is None for buffer in buffers] == [True, True, False, False]
    assert len(released) == run.graph.evictions == 2
    run.graph.close()
    assert [buffer() is None for buffer in buffers] == [True] * 4
    assert len(released) == 4


def test_the_account_of_a_region() -> None:
    run = Harness(lambda x, flag: x.sum().item() if flag else x * 2, max_entries=2, on_full="evict")
    for n in (4, 4, 8, 16, 8):
        run(torch.ones(n), False)
    run(torch.ones(4), True)
    stats = run.graph.stats()
    assert (stats.hits, stats.misses, stats.captures, stats.failures, stats.evictions) == (2, 4, 3, 1, 2)
    assert len(stats.blocked) == 1
    assert "capture_failed" in stats.blocked[0]
    assert stats.extra_bytes == run.graph.extra_bytes == sum(entry.nbytes for entry in stats.entries)
    assert stats.capture_ms >= sum(entry.capture_ms for entry in stats.entries) > 0
    (entry,) = stats.entries
    assert (entry.copied_in, entry.copied_out, entry.replays) == (32, 32, 2)
    assert entry.last_used > 0
    entry.replays = 0
    assert run.graph.stats().entries[0].replays == 2


@pytest.mark.parametrize(
    ("eager_ms", "replay_ms", "worth_it"), [(10, 5, True), (10, 9.8, False), (10, 12, False)]
)
def test_a_graph_that_saves_too_little_is_reported_and_kept(
    eager_ms: float, replay_ms: float, worth_it: bool
) -> None:
    run = Harness(doubled)
    run(X)
    (entry,) = run.graph._cache.entries()
    assert entry.stats.eager_ms > 0
    assert entry.stats.replay_ms > 0
    entry.stats.eager_ms, entry.stats.replay_ms = eager_ms, replay_ms
    stats = run.graph.stats()
    assert stats.entries[0].gain == pytest.approx(1 - replay_ms / eager_ms)
    assert len(stats.not_worth_it) == (not worth_it)
    run(X)
    assert run.outcome.kind is Kind.REPLAYED
