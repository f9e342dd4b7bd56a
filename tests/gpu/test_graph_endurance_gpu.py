"""Real CUDA graphs over many calls: entries that share a pool, bounded memory, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_graph_harness import MIB, Harness, allocator_noise, clean_cuda
from torch import Tensor

from accel.record import Kind, Reason

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_grad_on_cuda() -> Iterator[None]:
    with clean_cuda():
        yield


def mixed(x: Tensor) -> Tensor:
    """Matrix products and element-wise kernels with scratch memory in between."""
    for _ in range(3):
        x = ((x @ x.mT) @ x).tanh() + x.softmax(-1)
    return x


class Mismatches:
    """Counts wrong results on the device, so that no test waits after every call."""

    def __init__(self) -> None:
        self._count = torch.zeros((), dtype=torch.int64)

    def check(self, actual: Tensor, expected: Tensor) -> None:
        self._count += (actual != expected).sum()

    def total(self) -> int:
        return int(self._count.item())


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_two_graphs_of_one_pool_take_turns(outputs: str) -> None:
    run, wrong = Harness(mixed, outputs=outputs), Mismatches()  # type: ignore[arg-type]
    a, b = torch.randn(64, 64), torch.randn(32, 64)
    for round_ in range(1000):
        for x in (a, b, a):
            x.mul_(-0.999)
            wrong.check(run(x), mixed(x))
        if round_ % 50 == 0:
            allocator_noise()
    assert wrong.total() == 0
    assert run.count(Kind.CAPTURED) == 2
    assert run.count(Kind.REPLAYED) == 2998


def test_results_survive_the_replays_of_others() -> None:
    run, kept = Harness(mixed), []
    for i in range(20):
        x = torch.randn(16 * (1 + i % 3), 64)
        kept.append((run(x), mixed(x)))
        allocator_noise()
    assert all(torch.equal(actual, expected) for actual, expected in kept)


def test_evicting_a_graph_leaves_its_siblings_right() -> None:
    run, wrong = Harness(mixed, max_entries=2, on_full="evict"), Mismatches()
    sizes = (16, 32, 48)
    for n in sizes:
        run(torch.randn(n, 64))
    assert run.graph.evictions == 1
    for _ in range(20):
        allocator_noise()
        for n in sizes[1:]:
            x = torch.randn(n, 64)
            wrong.check(run(x), mixed(x))
    assert wrong.total() == 0
    assert run.last.kind is Kind.REPLAYED


def test_ten_thousand_requests_in_steady_memory() -> None:
    run, wrong = Harness(mixed, max_entries=2, on_full="evict"), Mismatches()
    inputs = [torch.randn(8 * n, 64) for n in range(1, 9)]
    draw, peaks = random.Random(0), []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5000):
            x = draw.choice(inputs)
            wrong.check(run(x), mixed(x))
            assert len(run.graph) <= 2
        peaks.append(torch.cuda.max_memory_reserved())
    assert wrong.total() == 0
    assert peaks[1] <= 1.01 * peaks[0]
    stats = run.graph.stats()
    assert stats.hits + stats.misses == 10_000
    assert 0 < stats.captures < 200


def test_random_numbers_go_on_as_in_eager_beside_eager_draws() -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * torch.rand(3, 1)

    run, x = Harness(f), torch.zeros(3, 64)

    def draws(fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(11)
        values = []
        for i in range(20):
            values.append(fn(x))
            if i % 3 == 0:
                values.append(torch.randn(5 + i))
        return values

    for _ in range(2):
        assert all(map(torch.equal, draws(run), draws(f)))
    assert run.count(Kind.REPLAYED) == 39


def test_a_graph_over_budget_gives_its_memory_back() -> None:
    def wide(x: Tensor) -> Tensor:
        return (x.repeat(64, 1) * 2).sum(0)

    run = Harness(wide, memory_budget_mb=256)
    small, large = torch.ones(1, MIB // 4), torch.ones(1, 4 * MIB)
    assert torch.equal(run(small), wide(small))
    held = run.graph.extra_bytes
    assert 0 < held <= 256 * MIB
    for reason in (Reason.OVER_BUDGET, Reason.BLOCKED_SIGNATURE):
        assert torch.equal(run(large), wide(large))
        assert run.last.reason is reason
        assert run.graph.extra_bytes == held
    assert torch.equal(run(small), wide(small))
    assert run.last.kind is Kind.REPLAYED


def test_when_memory_runs_out_the_graphs_make_room() -> None:
    def wide(x: Tensor) -> Tensor:
        return (x.repeat(64, 1) * 2).sum(0)

    run = Harness(wide, max_entries=1)
    run(torch.ones(1, MIB))  # 512 MiB in its graph
    large = torch.ones(1, 3 * MIB // 2)  # 768 MiB in eager
    expected = large[0] * 128
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 500 * MIB) / total)
    try:
        assert torch.equal(run(large), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run.last.reason is Reason.OOM
    assert len(run.graph) == 0
