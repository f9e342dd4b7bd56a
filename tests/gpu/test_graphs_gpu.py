"""Real CUDA graphs on cases C01 to C09 of the collected bug reports."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gpu_graph_harness import Harness, allocator_noise, clean_cuda
from torch import Tensor, nn

from accel.record import Kind, Reason

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_grad_on_cuda() -> Iterator[None]:
    with clean_cuda():
        yield


def test_c01_nested_conditioning_is_refreshed() -> None:
    def f(x: Tensor, cond: dict[str, Any]) -> Tensor:
        return x + cond["txt"]["pooled"] + 100 * cond["ids"][0] + 1000 * cond["ids"][1]

    def cond(pooled: float, a: float, b: float) -> dict[str, Any]:
        ids = (torch.tensor(a), torch.tensor(b))
        return {"txt": {"pooled": torch.full((4,), pooled)}, "ids": ids}

    run, x = Harness(f), torch.ones(4)
    first = cond(10, 1, 2)
    for c, value in ((first, 2111), (cond(20, 3, 4), 4321), (first, 2111)):
        assert run(x, c).eq(value).all()
    assert run(x, dict(reversed(first.items()))).eq(2111).all()
    assert [o.kind for o in run.outcomes] == [Kind.CAPTURED] + [Kind.REPLAYED] * 3


def test_c02_same_shapes_but_another_call() -> None:
    def f(x: Tensor, g: float = 1.0, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        return x * g + (0 if mask is None else mask) + (100 if flag else 0)

    x = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    run, transposed = Harness(f), x.t().contiguous().t()
    cases: list[tuple[Tensor, dict[str, Any]]] = [
        (x, {}),
        (x, {"g": 3.5}),
        (x, {"mask": torch.full_like(x, 10)}),
        (x, {"flag": True}),
        (transposed, {}),
        (x.bfloat16(), {}),
        (x.flatten(), {}),
    ]
    for _ in range(2):
        for value, kwargs in cases:
            result, eager = run(value, **kwargs), f(value, **kwargs)
            assert torch.equal(result, eager)
            assert (result.dtype, result.stride()) == (eager.dtype, eager.stride())
            allocator_noise()
    assert run.count(Kind.CAPTURED) == run.count(Kind.REPLAYED) == len(cases)
    many = Harness(f, max_entries=4)
    assert all(torch.equal(many(x, g=i / 50), x * (i / 50)) for i in range(50))
    assert (many.count(Kind.CAPTURED), many.last.reason) == (4, Reason.CACHE_FULL)
    minus = Harness(lambda a, b: a - b)
    assert minus(x, x).eq(0).all()
    assert minus(torch.tensor([5.0]), torch.tensor([2.0])).item() == 3


@dataclass
class Out:
    sample: Tensor
    extra: dict[str, list[Tensor]]


def test_c03_results_belong_to_the_caller() -> None:
    run = Harness(lambda x: (Out(x + 1, {"h": [2 * x]}), x, x[:1]))
    x = torch.ones(3)
    first, same, view = run(x)
    second, *_ = run(torch.full((3,), 5.0))
    assert first.sample.eq(2).all()
    assert same.eq(1).all()
    assert view.eq(1).all()
    first.sample.zero_()
    third, *_ = run(torch.full((3,), 5.0))
    for result in (second, third):
        assert result.sample.eq(6).all()
        assert result.extra["h"][0].eq(10).all()


def test_c04_weights_swapped_after_capture() -> None:
    x = torch.tensor([[1.0, 2, 3, 4]])
    module = nn.Linear(4, 4, bias=False).requires_grad_(False).eval()
    run = Harness(lambda x: module(x), modules=lambda: {"net": module})

    def swap(scale: float) -> None:
        module.weight = nn.Parameter(scale * torch.eye(4), requires_grad=False)

    swap(2.0)
    assert torch.equal(run(x), 2 * x)
    swap(3.0)
    assert torch.equal(run(x), 3 * x)
    module.weight.copy_(5 * torch.eye(4))
    assert torch.equal(run(x), 5 * x)
    assert run.last.kind is Kind.REPLAYED
    junk = torch.full((16 * MIB,), float("nan"))
    assert torch.equal(run(x), 5 * x)
    del module.weight
    swap(2.0)
    assert torch.equal(run(x), 2 * x)
    module.to("cpu").to("cuda")
    assert torch.equal(run(x), 2 * x)
    module.to("cpu")
    with pytest.raises(RuntimeError):
        run(x)  # as eager does
    assert len(run.graph) == 0
    del junk


@pytest.mark.parametrize("enabled", [True, False])
def test_c05_old_graphs_in_reference_cycles(enabled: bool) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        gc.collect()
        return y + 1

    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        run = Harness(f, max_entries=2, on_full="evict")
        for size in range(1, 9):
            old = Harness(lambda x: x + 1)
            old(torch.ones(size))
            old.cycle = old  # type: ignore[attr-defined]
            del old
            x = torch.ones(size)
            assert torch.equal(run(x), x * 3)
            assert gc.isenabled() is enabled
        assert len(run.graph) <= 2
    finally:
        (gc.enable if was else gc.disable)()


def test_c06_another_thread_uses_the_gpu() -> None:
    stop, failures = threading.Event(), []

    def disturb() -> None:
        stream = torch.cuda.Stream()
        try:
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    pinned = torch.ones(1000, device="cpu").pin_memory()
                    pinned.to("cuda", non_blocking=True)
                    stream.record_event().query()
                    torch.empty(3 * MIB, device="cuda")
                time.sleep(0)
        except Exception as error:
            failures.append(error)

    def f(x: Tensor, k: float) -> Tensor:
        return (x @ x.T).sum() + k

    run = Harness(f, max_entries=12)
    inputs = [(torch.ones(n, 8) / 8, float(n)) for n in range(1, 13)]
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        values = [run(x, k) for x, k in inputs]
    finally:
        stop.set()
        thread.join()
    values += [run(x, k) for x, k in inputs]
    assert all(torch.equal(v, f(x, k)) for v, (x, k) in zip(values, inputs * 2, strict=True))
    assert run.count(Kind.REPLAYED) > 6
    assert not failures


def test_c07_random_numbers_go_on_as_in_eager() -> None:
    def f(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return x + torch.randn(x.shape, generator=generator)

    run, x = Harness(f), torch.zeros(64)

    def draws(fn: Callable[..., Tensor], seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [fn(x), fn(x), torch.randn(4)]

    for seed in (1, 2, 1):
        assert all(map(torch.equal, draws(run, seed), draws(f, seed)))
    assert run.last.kind is Kind.REPLAYED
    for seed in (5, 6, 5):
        ours, theirs = (torch.Generator("cuda").manual_seed(seed) for _ in range(2))
        assert torch.equal(run(x, ours), f(x, theirs))
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert run.last.reason is Reason.UNSUPPORTED_INPUT


def test_c08_a_failed_capture_gives_its_memory_back() -> None:
    def f(x: Tensor) -> Tensor:
        big = torch.zeros(128 * MIB) + 2
        return x + big.max().item()

    run, x, reserved = Harness(f), torch.ones(1), []
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(6):
        assert run(x).item() == 3
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[1] <= 64 * MIB
    assert reserved[1] - before < 256 * MIB
    assert run.outcomes[0].reason is Reason.CAPTURE_FAILED
    assert "big.max().item()" in run.outcomes[0].detail
    assert run.last.reason is Reason.BLOCKED_SIGNATURE
    # Stream, generator and device are as good as new.
    torch.randn(4)
    other = Harness(lambda x: (x @ x.T).relu() + torch.randn_like(x))
    y = torch.randn(64, 64)
    torch.manual_seed(3)
    expected = (y @ y.T).relu() + torch.randn_like(y)
    torch.manual_seed(3)
    assert torch.equal(other(y), expected)
    assert other.last.kind is Kind.CAPTURED


def test_c09_many_resolutions_in_bounded_memory() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.repeat(20, 1, 1) * 2).sum(0)

    run, peaks = Harness(f, max_entries=2, on_full="evict"), []
    sizes = [torch.ones(n, n) for n in (512, 768, 1024)]
    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        for x in sizes:
            for _ in range(2):
                assert torch.equal(run(x), f(x))
                assert len(run.graph) <= 2
        peaks.append(torch.cuda.max_memory_reserved())
    assert peaks[9] <= 1.1 * max(peaks[:2])
    assert run.count(Kind.CAPTURED) < 12
    assert run.count(Kind.REPLAYED) > 20
