"""What a replay of a real CUDA graph costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_graph_harness import Harness
from torch import Tensor, nn

from accel.measure.timing import median, percentile

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Without `torch.device("cuda")` around the calls: it would be called for every operation."""
    with torch.inference_mode():
        yield


def host_us(call: Callable[[], object], *, rounds: int = 300) -> float:
    """Median time that a call keeps the host, the device being idle before, in microseconds."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - started))
    return median(times)


def deep_module(layers: int) -> nn.Module:
    """Linear layers with two weights each, and an activation after each."""
    pairs = [layer for _ in range(layers) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*pairs).requires_grad_(False).eval().cuda()


class Pair:
    """A module of 500 weights as a region, and as a graph written by hand: copy in, replay, copy out."""

    def __init__(self) -> None:
        self.module, self.x = deep_module(250), torch.randn(16, 64, device="cuda")
        self.region = Harness(lambda x: self.module(x), modules=lambda: {"net": self.module})
        self.region(self.x)
        self._static_x, self._graph = self.x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._static_y = self.module(self._static_x)

    def ours(self) -> Tensor:
        return self.region.graph.call((self.x,), {})[0]

    def by_hand(self) -> Tensor:
        self._static_x.copy_(self.x)
        self._graph.replay()
        return self._static_y.clone()


def test_a_replay_costs_little_more_than_one_written_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair()
    assert torch.equal(pair.ours(), pair.by_hand())
    ours, theirs = host_us(pair.ours), host_us(pair.by_hand)
    eager = host_us(lambda: pair.module(pair.x), rounds=50)
    with capsys.disabled():
        print(f"\nhost time with 500 weights: {ours:.0f} us, by hand {theirs:.0f} us, eager {eager:.0f} us")
    assert pair.region.graph.stats().hits > 300
    assert ours < eager / 10


def test_the_slowest_replays_stay_near_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    """10,000 replays of about a millisecond, in turn with a graph written by hand, which shows the jitter
    of the machine itself."""
    pair = Pair()
    times: dict[str, list[float]] = {"ours": [], "by_hand": []}
    for turn in range(20_000):
        name = "ours" if turn % 2 else "by_hand"
        started = time.perf_counter()
        getattr(pair, name)()
        torch.cuda.synchronize()
        times[name].append(1e6 * (time.perf_counter() - started))
    tails = {name: (percentile(walls, 50), percentile(walls, 99)) for name, walls in times.items()}
    with capsys.disabled():
        for name, (p50, p99) in tails.items():
            print(f"\n10,000 replays, {name}: p50 {p50:.0f} us, p99 {p99:.0f} us, ratio {p99 / p50:.3f}")
    p50, p99 = tails["ours"]
    assert p99 < 1.5 * p50
    assert p50 < 1.5 * tails["by_hand"][0]
