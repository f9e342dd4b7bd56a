"""Operations that can't be captured become breaks, and what Python learnt becomes a guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from segmented_harness import Segmented, record
from torch import Tensor

from accel.graphs.capture import RunEagerError
from accel.graphs.recording import RecordingBackend
from accel.record import Kind, Reason

X = torch.tensor([1.0, -2, 3, 0, 5, -6])
HOST = torch.float64  # stands for host memory


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def host_backend() -> RecordingBackend:
    return RecordingBackend(host_dtype=HOST)


def branch(x: Tensor, n: Tensor) -> Tensor:
    y = x * 2
    count = n.sum().item()
    return y + count if count > 2 else y - 1


def test_a_value_that_python_reads_is_a_guard() -> None:
    run = Segmented(branch)
    two, three = torch.tensor([1, 1]), torch.tensor([2, 1])
    run(X, two)
    for x in (X, X + 1, X * 3):
        assert torch.equal(run(x, two), branch(x, two))
        assert run.kind is Kind.REPLAYED
    for _ in range(2):
        assert torch.equal(run(X, three), branch(X, three))
        assert (run.kind, run.reason) == (Kind.EAGER, Reason.GUARD_FAILED)
        line = branch.__code__.co_firstlineno + 2
        assert run.outcome.detail == (
            f"test_automatic_breaks.py:{line} aten._local_scalar_dense.default (automatic): value 3 vs 2"
        )
    assert torch.equal(run(X, two), branch(X, two))
    assert run.kind is Kind.REPLAYED
    assert len(run.graph) == 1


def test_reports_of_guards_stay_bounded() -> None:
    run, details = Segmented(branch), set()
    run(X, torch.tensor([1]))
    for i in range(2, 60):
        run(X, torch.tensor([i]))
        details.add(run.outcome.detail)
    assert len(details) < 12


@pytest.mark.parametrize(
    "read",
    [
        lambda n: int(n),
        lambda n: float(n),
        lambda n: 1 if n > 2 else 5,
        lambda n: n.tolist(),
        lambda n: [1, 2, 3, 4][n],
        lambda n: len(torch.arange(n)),
        lambda n: 1 if torch.equal(n, n * 1) else 2,
        lambda n: int(f"{n}"),
        lambda n: torch.tensor([n, 1]).max() * 2,
    ],
)
def test_every_way_to_read_a_value_breaks(read: Callable[[Tensor], Any]) -> None:
    def f(x: Tensor, n: Tensor) -> Tensor:
        return (x + 1) * read(n * 1)

    run = Segmented(f)
    for n in (3, 3, 2, 3):
        assert torch.equal(run(X, torch.tensor(n)), f(X, torch.tensor(n)))
    assert run.kind is Kind.REPLAYED
    assert run.breaks


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x * 2).nonzero().sum() + x,
        lambda x: x + x[x > 0].sum(),
        lambda x: x.masked_select(x > 0).sum() + x,
        lambda x: x.unique().numel() + x,
        lambda x: torch.repeat_interleave(x, (x > 0).long() + 1).sum() + x,
    ],
)
def test_sizes_that_depend_on_values(fn: Callable[[Tensor], Tensor]) -> None:
    graph_input = X.clone()
    graph = record(lambda: fn(graph_input * 1))
    assert len(graph.breaks) == 1
    for new in (X, X * 2, X.flip(0)):
        graph_input.copy_(new)
        graph.replay()
        assert torch.equal(graph.outputs, fn(new))
    graph_input.copy_(torch.tensor([1.0, 1, 1, 1, 1, -1]))
    with pytest.raises(RunEagerError, match=r"(shape|value) .* vs ") as caught:
        graph.replay()
    assert caught.value.outcome.reason is Reason.GUARD_FAILED
    graph_input.copy_(X)
    graph.replay()
    assert torch.equal(graph.outputs, fn(X))


def test_counts_that_change_fall_back_to_eager_values() -> None:
    def f(x: Tensor, mask: Tensor) -> Tensor:
        picked = (x + 1)[mask]
        return picked * 2

    run, mask = Segmented(f), torch.tensor([1, 1, 0, 0, 1, 0], dtype=torch.bool)
    for m in (mask, mask.flip(0), ~mask, mask | True, mask):
        assert torch.equal(run(X, m), f(X, m))
    assert run.kind is Kind.REPLAYED
    assert len(run.graph) == 1


def test_writing_through_a_mask() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        y[y > 1] = 7.0
        y[x < 0] += x[x < 0]
        return y + 1

    run = Segmented(f)
    for x in (X, X + 0.25, X * 3):
        assert torch.equal(run(x), f(x))


def test_constants_from_lists_survive_being_overwritten() -> None:
    def f(x: Tensor) -> Tensor:
        table = torch.tensor([1.0, 2, 3, 4, 5, 6])
        table.mul_(x)
        index = torch.as_tensor([3, 1])
        first = x[[0, 2]] + x[np.array([1, 5])]
        y = x.new_tensor([1, 1]) * table[index] + first
        y[[0]] = torch.asarray([9.0])
        return y

    run = Segmented(f)
    for x in (X, X + 1, X.flip(0)):
        assert torch.equal(run(x), f(x))
    assert run.kind is Kind.REPLAYED
    assert "torch.tensor" in [each.op for each in run.breaks]


def test_host_values_are_guards_and_uploads_are_constants() -> None:
    def f(x: Tensor) -> Tensor:
        host = (x * 2).to(HOST)
        top = host.max() + 1  # on the host: no break
        scale = float(top)
        device = torch.linspace(0, 1, 6, dtype=HOST).to(torch.float32)
        return x * scale + device.mul_(x)

    x = X.clone()
    graph = record(lambda: f(x), backend=host_backend())
    assert [each.op for each in graph.breaks] == ["aten._to_copy.default"] * 2
    for _ in range(2):
        graph.replay()
        assert torch.equal(graph.outputs, f(X))
    x.add_(1)
    with pytest.raises(RunEagerError, match="host values differ"):
        graph.replay()
    x.copy_(X)
    graph.replay()
    assert torch.equal(graph.outputs, f(X))


def test_a_host_tensor_that_changes_after_the_recording_is_noticed() -> None:
    sigmas = torch.tensor([0.5, 0.25], dtype=HOST)
    for use in (lambda: X * sigmas[0], lambda: X + sigmas.to(torch.float32)[0], lambda: X * sigmas[1].item()):
        graph = record(use, backend=host_backend())
        graph.replay()
        assert torch.equal(graph.outputs, use())
        sigmas.mul_(2)
        with pytest.raises(RunEagerError, match=r"test_automatic_breaks\.py"):
            graph.replay()


def test_copies_between_host_and_device_repeat() -> None:
    buffer = torch.zeros(6, dtype=HOST)
    x = X.clone()

    def f() -> Tensor:
        y = torch.empty_like(x)
        y.copy_(buffer)
        return y + x

    graph = record(f, backend=host_backend())
    buffer.fill_(3)
    x.add_(1)
    graph.replay()
    assert torch.equal(graph.outputs, X + 4)


def test_random_numbers_on_the_host_are_refused() -> None:
    for draw in (lambda: torch.randn(6, dtype=HOST), lambda: torch.zeros(6, dtype=HOST).normal_()):
        with pytest.raises(RunEagerError, match="random numbers drawn on the host"):
            record(lambda draw=draw: X + draw().to(torch.float32), backend=host_backend())
    assert not record(lambda: X + torch.randn(6)).breaks


def test_a_region_that_hides_a_refusal_is_not_served() -> None:
    def f() -> Tensor:
        try:
            return X + torch.randn(6, dtype=HOST).to(torch.float32)
        except Exception:
            return X

    with pytest.raises(RunEagerError, match="random numbers"):
        record(f, backend=host_backend())


def test_reading_twice_in_a_row_guards_once() -> None:
    def f(x: Tensor) -> Tensor:
        top = x.max()
        return x * float(top) if top > 0 and int(top) > 2 and float(top) < 100 else x

    graph = record(lambda: f(X))
    assert len(graph.breaks) == 2  # `top > 0` is captured work, then `top` itself
    y = X.max()
    assert len(record(lambda: X * (y.item() + float(y) + y.item())).breaks) == 1


def test_breaks_carry_their_place_in_the_user_s_code() -> None:
    def helper(x: Tensor) -> Tensor:
        return x[x > 0]

    def f(x: Tensor) -> Tensor:
        a = helper(x * 2)
        b = torch.unique(x)
        return a.sum() + b.sum()

    places = [(each.kind, each.op, each.file, each.line) for each in record(lambda: f(X)).breaks]
    assert places == [
        ("automatic", "aten.index.Tensor", "test_automatic_breaks.py", helper.__code__.co_firstlineno + 1),
        ("automatic", "aten._unique2.default", "test_automatic_breaks.py", f.__code__.co_firstlineno + 2),
    ]


def test_regions_without_breaks_are_one_segment() -> None:
    backend = RecordingBackend()
    graph = record(lambda: (X * 2 + X.sum()).softmax(-1)[torch.arange(3)], backend=backend)
    assert (backend.captures, graph.breaks) == (1, ())
    graph.replay()
    assert torch.equal(graph.outputs, (X * 2 + X.sum()).softmax(-1)[:3])
