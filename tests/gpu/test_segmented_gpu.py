"""Graphs in segments on CUDA: declared and automatic breaks, memory, failures."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gpu_graph_harness import allocator_noise, clean_cuda
from torch import Tensor, nn

from accel.graphs.breaks import call_break, graph_break
from accel.graphs.cuda import CudaBackend
from accel.graphs.modules import ModuleWatch
from accel.graphs.program import SegmentedGraph
from accel.graphs.segmented import SegmentedRecorder
from accel.graphs.whole import WholeGraph
from accel.policy import StagePolicy
from accel.record import Kind, Outcome, Reason

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_grad_on_cuda() -> Iterator[None]:
    with clean_cuda():
        yield


class Segmented:
    """A function behind a WholeGraph that records in segments."""

    def __init__(self, fn: Callable[..., Any], *, max_segments: int = 512) -> None:
        backend = CudaBackend(torch.device("cuda"))
        self.graphs: list[SegmentedGraph] = []
        recorder = SegmentedRecorder(backend, max_segments=max_segments, name="toy.f")

        def keep(fn: Callable[[], Any], pool: Any) -> SegmentedGraph:
            self.graphs.append(recorder(fn, pool))
            return self.graphs[-1]

        policy = StagePolicy(
            enable_cuda_graph=True, graph_mode="segmented", max_entries=4, max_segments=max_segments,
            on_full="eager", fused={},
        )  # fmt: skip
        self.graph = WholeGraph(
            fn, name="toy.f", backend=backend, watch=ModuleWatch(dict, backend.device), policy=policy,
            fused=frozenset(), record=keep,
        )  # fmt: skip
        self.outcome = Outcome(Kind.EAGER)

    def __call__(self, *args: Any) -> Any:
        value, self.outcome = self.graph.call(args, {})
        return value

    def operations(self) -> list[str]:
        return [each.op for each in self.graphs[-1].breaks]


def assert_same_as_eager(fn: Callable[..., Any], *fixed: Any, shape: tuple[int, ...] = (64, 64)) -> Segmented:
    """20 calls with new inputs equal eager, all but the first are replays."""
    run = Segmented(fn)
    for i in range(20):
        allocator_noise()
        x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(i))
        assert torch.equal(run(x, *fixed), fn(x, *fixed)), (i, run.outcome)
        assert run.outcome.kind is (Kind.REPLAYED if i else Kind.CAPTURED), run.outcome.detail
    return run


@graph_break
def masked_mean(x: Tensor) -> Tensor:
    return x + x[x > 0].mean()


def test_declared_breaks_among_matrix_products() -> None:
    weight = torch.randn(64, 64) / 8

    @graph_break
    def product_in_a_break(x: Tensor) -> Tensor:
        return masked_mean(x @ weight) @ weight

    def f(x: Tensor) -> Tensor:
        y = product_in_a_break((x @ weight).tanh())
        z = call_break(lambda a, *, out: torch.mul(a, a[a > 0].sum(), out=out), y, out=torch.empty_like(y))
        return masked_mean(z @ weight) @ weight

    run = assert_same_as_eager(f)
    assert len(run.operations()) == 3


def test_a_region_that_is_only_breaks_has_no_segments_and_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA Graph is empty")
        run = assert_same_as_eager(lambda x: masked_mean(masked_mean(x)))
    assert run.graphs[-1].empty


@pytest.mark.parametrize("reads_only", [False, True])
def test_ninety_six_breaks_and_what_they_cost(reads_only: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The attention calls of a 48-block two-tower video model, small."""
    layers = [nn.Linear(256, 768).requires_grad_(False).bfloat16() for _ in range(48)]

    @graph_break(reads_only=reads_only)
    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, 4, 64)).permute(1, 2, 0, 3).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)

    def f(x: Tensor) -> Tensor:
        for layer in layers:
            for _ in range(2):
                x = nn.functional.layer_norm(x + attend(layer(x)), (256,))
        return x

    run = Segmented(f)
    x = torch.randn(512, 256, dtype=torch.bfloat16)
    run(x)
    assert run.outcome.kind is Kind.CAPTURED, run.outcome.detail
    assert run.operations() == ["attend"] * 96
    for _ in range(5):
        allocator_noise()
        x = torch.randn_like(x)
        assert torch.equal(run(x), f(x))
        assert run.outcome.kind is Kind.REPLAYED
    times = {}
    for name, call in (("segmented", run), ("eager", f)):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            call(x)
        torch.cuda.synchronize()
        times[name] = 100 * (time.perf_counter() - started)
    with capsys.disabled():
        held = run.graph.extra_bytes / MIB
        speed = f"{times['segmented']:.1f} ms, eager {times['eager']:.1f} ms"
        print(f"\n96 breaks, {reads_only=}: {speed}, {held:.0f} MiB held")
    # 96 break inputs of 768 KiB and outputs of 256 KiB, rounded up, and the segments' own scratch; or
    # two slots of the former and a few of the latter.
    assert run.graph.extra_bytes < (100 if reads_only else 400) * MIB
    few = Segmented(f, max_segments=64)
    assert torch.equal(few(x), f(x))
    assert few.outcome.reason is Reason.TOO_MANY_SEGMENTS


def test_reading_a_value_is_a_guard() -> None:
    def f(x: Tensor, n: Tensor) -> Tensor:
        count = int((n * 2).sum())
        return (x * count).sin() if count > 5 else x + count

    run = assert_same_as_eager(f, torch.tensor([1, 2]))
    x = torch.randn(64, 64)
    assert torch.equal(run(x, torch.tensor([2, 2])), f(x, torch.tensor([2, 2])))
    assert run.outcome.reason is Reason.GUARD_FAILED
    assert "test_segmented_gpu.py:" in run.outcome.detail
    assert run.outcome.detail.endswith("value 8 vs 6")
    run(x, torch.tensor([1, 2]))
    assert run.outcome.kind is Kind.REPLAYED


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, m: x[0, m].sum() + x,
        lambda x, m: m.nonzero().sum() + x,
        lambda x, m: x + torch.repeat_interleave(x[0], m.long()).mean(),
        lambda x, m: x.index_put((m.nonzero(as_tuple=True)[0],), torch.tensor(7.0)),
        lambda x, m: x * m.cpu().sum().item() + len(m.tolist()),
        lambda x, m: x + m.long().unique().numel(),
    ],
)
def test_operations_that_wait_for_the_device(fn: Callable[..., Tensor]) -> None:
    mask = torch.arange(64) % 3 == 0
    run = assert_same_as_eager(fn, mask)
    assert run.operations()
    x = torch.randn(64, 64)
    for other in (mask.flip(0), ~mask, mask):
        assert torch.equal(run(x, other), fn(x, other))
    assert run.outcome.kind is Kind.REPLAYED


def test_writing_through_a_mask() -> None:
    def f(x: Tensor, m: Tensor) -> Tensor:
        y = x * 2
        y[:, m] = 7.0
        y[m] += 1
        return y.exp()

    assert_same_as_eager(f, torch.arange(64) % 5 == 0)


def test_constants_from_the_host() -> None:
    array = np.linspace(0, 1, 64, dtype=np.float32)

    def f(x: Tensor, n: Tensor) -> Tensor:
        y = torch.tensor([0.5, 0.25], device="cuda")
        y *= x[0, :2]  # overwritten: a replay must start from the constant again
        z = torch.tensor(3) + torch.as_tensor(array, device=x.device) + x.new_tensor([1.0])
        table = torch.from_numpy(array).to("cuda", non_blocking=True)
        mixed = torch.tensor([n.sum(), 1]) * torch.ones((), device="cpu")
        return x[[0, 2]] * y.sum() + z * table + mixed.sum() + x[np.array([3, 1])]

    n = torch.tensor([1, 2])
    run = assert_same_as_eager(f, n)
    assert {"torch.tensor", "torch.as_tensor", "aten._to_copy.default"} <= set(run.operations())
    x = torch.randn(64, 64)
    array += 1
    assert torch.equal(run(x, n), f(x, n))
    assert run.outcome.reason is Reason.GUARD_FAILED


def test_random_numbers_advance_as_in_eager() -> None:
    def f(x: Tensor) -> Tensor:
        return masked_mean(x + torch.randn(64, 64)) * torch.rand(64, 64)

    run, x = Segmented(f), torch.randn(64, 64)
    torch.cuda.manual_seed(5)
    got = [run(x) for _ in range(4)]
    torch.cuda.manual_seed(5)
    assert all(torch.equal(each, f(x)) for each in got)
    assert run.outcome.kind is Kind.REPLAYED


def test_side_streams_inside_segments_work_and_breaks_on_them_are_refused() -> None:
    side = torch.cuda.Stream()

    def forked(x: Tensor, inside: Callable[[Tensor], Tensor]) -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = inside(x * 2)
        z = x.sin()
        main.wait_stream(side)
        return masked_mean(y + z)

    assert_same_as_eager(lambda x: forked(x, torch.cos))
    run, x = Segmented(lambda x: forked(x, masked_mean)), torch.randn(64, 64)
    assert torch.equal(run(x), forked(x, masked_mean))
    assert run.outcome.reason is Reason.BREAK_IN_SIDE_STREAM
    assert not torch.cuda.is_current_stream_capturing()


def test_work_that_a_break_leaves_on_another_stream() -> None:
    side = torch.cuda.Stream()

    @graph_break
    def fork(x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.detach().clone().sin_()
        return x + x[x > 0].mean()

    assert_same_as_eager(lambda x: fork(x * 2).cos())


def test_two_graphs_share_a_pool_and_one_is_destroyed() -> None:
    run = Segmented(lambda x: masked_mean((x @ x).tanh()) @ x)
    shapes = [torch.randn(64, 64), torch.randn(128, 128)]
    for _ in range(3):
        for x in shapes:
            allocator_noise()
            assert torch.equal(run(x), masked_mean((x @ x).tanh()) @ x)
    assert run.outcome.kind is Kind.REPLAYED
    other = Segmented(lambda x: masked_mean(x @ x))
    other(shapes[0])
    run.graph.close()
    assert torch.equal(other(shapes[0]), masked_mean(shapes[0] @ shapes[0]))
    assert other.outcome.kind is Kind.REPLAYED


@pytest.mark.parametrize("where", ["segment", "later segment", "break"])
def test_a_failure_leaves_the_stream_usable(where: str) -> None:
    broken = True

    def f(x: Tensor) -> Tensor:
        y = x * 2
        if broken and where == "segment" and torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()  # illegal in a capture
        y = call_break(body, y) + 1
        if broken and where == "later segment" and torch.cuda.is_current_stream_capturing():
            raise ValueError("not now")
        return y @ x

    calls = 0

    def body(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if broken and where == "break" and calls == 3:
            raise ValueError("not now")
        return x + x[x > 0].mean()

    x = torch.randn(64, 64)
    run = Segmented(f)
    result = run(x)
    assert run.outcome.reason is Reason.CAPTURE_FAILED, run.outcome
    broken = False
    assert torch.equal(result, f(x))
    torch.cuda.synchronize()
    assert_same_as_eager(f)
