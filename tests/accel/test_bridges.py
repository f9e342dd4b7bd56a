"""Breaks that share memory, by themselves and in segmented graphs on the recording backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from segmented_harness import Segmented, record
from torch import Tensor, nn

from accel.graphs.breaks import graph_break
from accel.graphs.bridges import BridgeArena
from accel.graphs.capture import RunEagerError
from accel.record import Kind, Reason


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def arena() -> BridgeArena:
    return BridgeArena(on_host=lambda tensor: tensor.dtype == torch.int64)


def inputs(count: int = 6) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(4, 3, generator=generator) for _ in range(count))


@graph_break(reads_only=True)
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.T, dim=-1) @ v


def test_arguments_take_turns_in_two_slots() -> None:
    shared, x = arena(), torch.randn(4, 6).T
    first, second, third = (shared.stage({"x": x + i})["x"] for i in range(3))
    assert torch.equal(third, x + 2)
    assert torch.equal(second, x + 1)
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    assert third.stride() == x.stride()
    assert shared.nbytes == 2 * x.nbytes


def test_a_tensor_passed_twice_stays_one_and_equal_layouts_get_slots_of_their_own() -> None:
    x, y = torch.randn(3), torch.randn(3)
    a, b, again = arena().stage((x, y, x))
    assert a is again
    assert a.data_ptr() != b.data_ptr()
    assert torch.equal(a, x)
    assert torch.equal(b, y)


def test_weights_host_tensors_and_constants_are_passed_on() -> None:
    weight, ids = nn.Parameter(torch.ones(2)), torch.arange(3)
    staged = arena().stage((weight, ids, 0.5))
    assert all(got is given for got, given in zip(staged, (weight, ids, 0.5), strict=True))


def test_a_result_buffer_is_lent_again_when_nobody_reads_it_any_more() -> None:
    shared, x = arena(), torch.randn(4, 3)
    kept = shared.result(x)
    break_holds = kept.detach()
    view = kept[1:]
    del kept
    other = shared.result(x + 1)
    assert other.data_ptr() != break_holds.data_ptr()
    assert torch.equal(view, x[1:])
    del view
    later = shared.result(x + 2)
    assert later.data_ptr() == break_holds.data_ptr()
    assert torch.equal(other, x + 1)
    assert shared.nbytes == 2 * x.nbytes


def test_breaks_that_share_memory_give_the_values_of_eager() -> None:
    def f(x: Tensor) -> Tensor:
        first = attend(x, x * 2, x.sin())
        y = first
        for _ in range(5):
            y = attend(y, y + x, y.cos()) + y
        return y + first  # read long after its break

    run = Segmented(f)
    for i, x in enumerate(inputs()):
        assert torch.equal(run(x), f(x))
        assert run.kind is (Kind.REPLAYED if i else Kind.CAPTURED)
    assert len(run.breaks) == 6


def test_a_result_that_is_an_argument_is_copied_out_of_the_slot() -> None:
    @graph_break(reads_only=True)
    def top(x: Tensor) -> Tensor:
        return x[:2]

    def f(x: Tensor) -> Tensor:
        first = top(x * 2)
        return torch.cat([first, top(x * 3), top(x * 4), first])

    run = Segmented(f)
    for x in inputs():
        assert torch.equal(run(x), f(x))
    assert run.kind is Kind.REPLAYED


def test_a_break_that_only_reads_must_not_write() -> None:
    @graph_break(reads_only=True)
    def write(x: Tensor) -> Tensor:
        return x.mul_(2)

    with pytest.raises(RunEagerError, match=r"write \(declared\): declared reads_only, but writes") as error:
        record(lambda: write(torch.ones(3)))
    assert error.value.outcome.reason is Reason.CAPTURE_FAILED


def test_a_condition_and_reads_only_go_together() -> None:
    @graph_break(when=lambda x: x.shape[0] > 2, reads_only=True)
    def mean(x: Tensor) -> Tensor:
        return x - x.mean()

    run = Segmented(lambda x: mean(mean(x)[:2]))
    for x in inputs():
        assert torch.equal(run(x), mean(mean(x)[:2]))
    assert len(run.breaks) == 1
