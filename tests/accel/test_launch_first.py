"""A replay is launched before the rest is looked at, unless it runs code of the caller's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from graph_harness import Harness
from segmented_harness import Segmented
from torch import Tensor, nn

from accel.graphs.breaks import graph_break
from accel.graphs.recording import RecordedGraph, RecordingBackend
from accel.record import Kind, Reason

DTYPES = (torch.float32, torch.float64)
X = torch.tensor([[1.0, -2, 3], [4, 5, -6]])


@pytest.fixture(autouse=True)
def default_dtype_restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    with torch.no_grad():
        yield
    torch.set_default_dtype(before)


def test_breaks_run_once_when_a_change_ends_in_eager() -> None:
    runs: list[int] = []

    @graph_break
    def counted(x: Tensor) -> Tensor:
        runs.append(1)
        return x + 1

    run = Segmented(lambda x: counted(x * 2))
    run(X)
    run.graph.allow_capture = False
    runs.clear()
    torch.set_default_dtype(torch.float64)
    assert torch.equal(run(X), X * 2 + 1)
    assert run.reason is Reason.NOT_WARMED
    assert len(runs) == 1


def test_a_guard_does_not_hide_that_a_switch_has_changed() -> None:
    @graph_break
    def ones(x: Tensor) -> Tensor:
        return torch.ones(2, 3)

    run = Segmented(lambda x: x * ones(x))
    for dtype in DTYPES:
        torch.set_default_dtype(dtype)
        kinds = []
        for _ in range(2):
            assert run(X).dtype == dtype
            kinds.append(run.kind)
        assert kinds == [Kind.CAPTURED, Kind.REPLAYED]


def test_a_host_value_that_changes_together_with_a_switch_is_recorded_anew() -> None:
    gain = torch.tensor(2, dtype=torch.int32)  # stands for host memory

    run = Segmented(lambda x: x * gain, backend=RecordingBackend(host_dtype=torch.int32))
    for value, dtype in ((2, torch.float32), (3, torch.float64)):
        gain.fill_(value)
        torch.set_default_dtype(dtype)
        assert torch.equal(run(X), X * value)
        assert run.kind is Kind.CAPTURED


def test_what_is_refused_again_and_again_is_launched_once() -> None:
    """The device does not work in vain, nor are launches counted that served nobody."""
    net = nn.Linear(3, 3).eval().requires_grad_(False)
    run = Harness(net.forward, modules=lambda: {"net": net})
    run(X)
    hook = net.register_forward_hook(lambda *_: None)
    launched = launches(run)
    for _ in range(3):
        run(X)
        assert run.outcome.reason is Reason.FORWARD_HOOK
    assert len(launched) == 1
    hook.remove()
    for _ in range(3):
        assert torch.equal(run(X), net(X))
        assert run.outcome.kind is Kind.REPLAYED
    assert run.graph.stats().entries[0].replays == 4


def test_switches_that_alternate_launch_no_graph_in_vain() -> None:
    run = Harness(lambda x: x + 1)
    for dtype in DTYPES:
        torch.set_default_dtype(dtype)
        run(X)
    launched = launches(run)
    for i in range(6):
        torch.set_default_dtype(DTYPES[i % 2])
        assert torch.equal(run(X), X + 1)
        assert run.outcome.kind is Kind.REPLAYED
    assert len(launched) == 6


def test_random_numbers_of_a_launch_that_served_nobody_are_drawn_again() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn(2, 3)

    def values_of(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        values = []
        for dtype in DTYPES:
            torch.set_default_dtype(dtype)
            values += [call(X), call(X)]
        return [*values, torch.randn(2)]

    run = Harness(noisy)
    assert all(map(torch.equal, values_of(run), values_of(noisy)))
    assert run.outcome.kind is Kind.REPLAYED
    assert run.graph.stats().captures == 2


def launches(run: Harness) -> list[RecordedGraph]:
    """The graphs that are replayed from now on."""
    launched: list[RecordedGraph] = []
    for graph in run.backend._graphs:
        vars(graph)["replay"] = functools.partial(noted, graph, launched)
    return launched


def noted(graph: RecordedGraph, launched: list[RecordedGraph]) -> None:
    launched.append(graph)
    RecordedGraph.replay(graph)
