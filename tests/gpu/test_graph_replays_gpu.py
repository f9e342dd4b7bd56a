"""Real CUDA graphs side by side and across streams, and which kernels they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_graph_harness import Harness, allocator_noise, clean_cuda
from torch import Tensor, nn

from accel.graphs import argument_keys
from accel.measure.profile import profile_call
from accel.record import Kind

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_grad_on_cuda() -> Iterator[None]:
    with clean_cuda():
        yield


def test_a_like_call_is_not_described_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor, a: Tensor) -> Tensor:
        return x @ a

    run = Harness(f)
    shapes = ((64, 32), (128, 32))
    for rows, width in shapes:
        run(torch.randn(rows, width), torch.randn(width, 16))
    monkeypatch.setattr(argument_keys, "flatten", None)
    for rows, width in shapes * 3:
        x, a = torch.randn(rows, width), torch.randn(width, 16)
        assert torch.equal(run(x, a), f(x, a))
        assert run.last.kind is Kind.REPLAYED
    monkeypatch.undo()
    x, a = torch.randn(64 * 32 + 1)[1:].view(64, 32), torch.randn(32, 16)  # another alignment
    assert torch.equal(run(x, a), f(x, a))
    assert run.last.kind is Kind.CAPTURED


def test_destroying_one_graph_leaves_the_others_right() -> None:
    module = nn.Linear(256, 256).requires_grad_(False).eval().bfloat16()
    first = Harness(lambda x: module(x) @ x.T, modules=lambda: {"net": module})
    second = Harness(lambda x: module(module(x)), modules=lambda: {"net": module})
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    first(x), second(x)
    first.graph.close()
    for _ in range(20):
        allocator_noise()
        x = torch.randn_like(x)
        assert torch.equal(second(x), module(module(x)))
    assert second.last.kind is Kind.REPLAYED


def test_weights_that_left_the_device_memory_break_nothing() -> None:
    """A launch comes before the look at the weights: it must find memory, and the value comes from eager."""
    module = nn.Linear(4096, 4096).requires_grad_(False).eval()
    run = Harness(lambda x: module(x), modules=lambda: {"net": module})
    x = torch.randn(8, 4096)
    assert torch.equal(run(x), module(x))
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        module.weight.data = torch.randn_like(module.weight)
        torch.cuda.empty_cache()
        allocator_noise()
        assert torch.equal(run(x), module(x))
        assert run.last.kind is Kind.CAPTURED
        assert torch.cuda.memory_allocated() == before
    assert torch.equal(run(x), module(x))
    assert run.last.kind is Kind.REPLAYED


def test_replays_on_another_stream_wait_for_the_previous_one() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ x).softmax(-1)
        return x

    run, streams = Harness(f), [torch.cuda.Stream() for _ in range(2)]
    inputs = [torch.rand(1024, 1024) for _ in range(8)]
    run(inputs[0])
    torch.cuda.synchronize()
    results = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 2]):
            results.append(run(x))
    torch.cuda.synchronize()
    assert all(torch.equal(result, f(x)) for result, x in zip(results, inputs, strict=True))


def test_replays_run_the_kernels_of_eager() -> None:
    layers = [layer for _ in range(50) for layer in (nn.Linear(64, 64), nn.GELU())]
    module, x = nn.Sequential(*layers).requires_grad_(False).eval(), torch.randn(16, 64)
    run = Harness(lambda x: module(x), modules=lambda: {"net": module})
    run(x)
    # Profiled last: a process that was profiled once launches graphs more slowly from then on.
    eager = profile_call(lambda: module(x), device=torch.device("cuda"))
    replayed = profile_call(lambda: run(x), device=torch.device("cuda"))
    assert eager is not None
    assert replayed is not None
    assert eager.launches >= 100
    assert eager.launches <= replayed.launches <= eager.launches + 4  # copies in and out
    assert 0 < replayed.gpu_busy_ms < 10
