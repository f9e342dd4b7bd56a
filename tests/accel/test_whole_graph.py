"""Whole-region graphs: replays give the values of eager, whatever changes between calls."""

from __future__ import annotations

import gc
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from graph_harness import Harness, X
from torch import Tensor, nn

from accel.record import Kind, Reason


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_c01_nested_conditioning_is_refreshed() -> None:
    def f(x: Tensor, cond: dict[str, Any]) -> Tensor:
        return x + cond["txt"]["pooled"] + 100 * cond["ids"][0] + 1000 * cond["ids"][1]

    def cond(pooled: float, a: float, b: float) -> dict[str, Any]:
        ids = (torch.tensor(a), torch.tensor(b))
        return {"txt": {"pooled": torch.full((4,), pooled)}, "ids": ids}

    run, x = Harness(f), torch.ones(4)
    first, second = cond(10, 1, 2), cond(20, 3, 4)
    extra = first | {"extra": torch.zeros(4)}
    listed = first | {"ids": list(first["ids"])}
    reordered = {"ids": first["ids"], "txt": first["txt"]}
    values = [run(x, c)[0].item() for c in (first, second, first, extra, listed)]
    assert values == [2111, 4321, 2111, 2111, 2111]
    assert run.backend.captures == 3
    assert run(x, reordered).eq(2111).all()
    assert run.outcome.kind is Kind.REPLAYED


def test_c02_same_shapes_but_another_call() -> None:
    def f(x: Tensor, g: float = 1.0, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        return x * g + (0 if mask is None else mask) + (100 if flag else 0)

    run = Harness(f)
    transposed = X.t().contiguous().t()
    cases: list[tuple[Any, dict[str, Any]]] = [
        ((X,), {}),
        ((X,), {"g": 3.5}),
        ((X,), {"mask": torch.full_like(X, 10)}),
        ((X,), {"mask": None}),
        ((X,), {"flag": True}),
        ((X,), {"flag": False}),
        ((transposed,), {}),
        ((X.bfloat16(),), {}),
        ((X.flatten(),), {}),
    ]
    for args, kwargs in cases * 2:
        value, eager = run(*args, **kwargs), f(*args, **kwargs)
        assert torch.equal(value, eager)
        assert (value.dtype, value.stride()) == (eager.dtype, eager.stride())
    captures = run.backend.captures
    assert torch.equal(run(X, flag=False, mask=None, g=1.0), X)
    assert run.backend.captures == captures


def test_c02_one_tensor_twice_is_not_two_tensors() -> None:
    run = Harness(lambda a, b: torch.zeros_like(a) if a is b else a - b)
    t = torch.tensor([4.0])
    assert run(t, t).item() == 0
    assert run(torch.tensor([5.0]), torch.tensor([2.0])).item() == 3


@dataclass
class Out:
    sample: Any
    extra: Any


Named = namedtuple("Named", "sample extra")


class DictOut(OrderedDict[str, Any]):
    """Like the model outputs of libraries: entries that are attributes too."""

    def __init__(self, sample: Any, extra: Any) -> None:
        super().__init__(sample=sample, extra=extra)
        self.sample, self.extra = sample, extra


@pytest.mark.parametrize("kind", [Out, Named, DictOut])
def test_c03_results_belong_to_the_caller(kind: Any) -> None:
    run = Harness(lambda x: kind(x + 1, {"h": [2 * x]}))
    first, second = run(torch.ones(3)), run(torch.full((3,), 5.0))
    assert type(first) is kind
    assert first.sample.eq(2).all()
    assert first.extra["h"][0].eq(2).all()
    first.sample.zero_()
    third = run(torch.full((3,), 5.0))
    for result in (second, third):
        assert result.sample.eq(6).all()
        assert result.extra["h"][0].eq(10).all()
    if kind is DictOut:
        assert third["sample"] is third.sample
        assert list(third) == ["sample", "extra"]


def test_c03_inputs_views_and_repeats_as_outputs() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return x, x[:1], y, y, x[:, ::2], x.t()

    run = Harness(f)
    first, eager = run(X), f(X)
    run(X * 7)
    for value, expected in zip(first, eager, strict=True):
        assert torch.equal(value, expected)
        assert value.stride() == expected.stride()
    assert first[2] is first[3]


class Linear4(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.eye(4), requires_grad=False)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.shift


def test_c04_weights_swapped_after_capture() -> None:
    x, module = torch.tensor([1.0, 2, 3, 4]), Linear4(2.0).eval()
    run = Harness(lambda x: module(x), modules=lambda: {"net": module})

    def swap(scale: float) -> None:
        module.weight = nn.Parameter(scale * torch.eye(4), requires_grad=False)

    assert torch.equal(run(x), 2 * x)
    swap(3.0)
    assert torch.equal(run(x), 3 * x)
    module.weight.copy_(5 * torch.eye(4))
    assert torch.equal(run(x), 5 * x)
    assert run.outcome.kind is Kind.REPLAYED
    junk = torch.full((1 << 20,), float("nan"))
    assert torch.equal(run(x), 5 * x)
    try:
        del module.weight
        swap(2.0)
        raise RuntimeError("adapter load failed")
    except RuntimeError:
        assert torch.equal(run(x), 2 * x)
    module.shift = torch.ones(4)
    assert torch.equal(run(x), 2 * x + 1)
    assert run.outcome.kind is Kind.CAPTURED
    module.weight.data = 4 * torch.eye(4)
    assert torch.equal(run(x), 4 * x + 1)
    assert len(run.graph) == 1
    del junk


def test_a_returned_weight_is_the_weight() -> None:
    module = Linear4(2.0).eval()
    run = Harness(lambda x: (x + 1, module.weight), modules=lambda: {"net": module})
    assert run(torch.ones(4))[1] is module.weight


def test_expanded_misaligned_and_overlapping_inputs() -> None:
    def f(x: Tensor) -> Tensor:
        return x.cumsum(-1)

    run = Harness(f, max_entries=16)
    expanded = torch.arange(3.0).expand(4, 3)
    misaligned = torch.arange(9.0)[1:]
    for x in (expanded, misaligned, X[:, ::2], torch.empty(0, 3), torch.tensor(2.0).expand(3)):
        for scale in (1, 3):
            assert torch.equal(run(x * scale if scale > 1 else x), f(x * scale))
        run(x)
        assert run.outcome.kind is Kind.REPLAYED
    windows = torch.arange(6.0).as_strided((3, 4), (1, 1))
    assert torch.equal(run(windows), f(windows))
    assert run.outcome.reason is Reason.UNSUPPORTED_INPUT
    assert run.outcome.detail.startswith("x: ")


def test_random_numbers_go_on_as_in_eager() -> None:
    run = Harness(lambda x: x + torch.randn_like(x))
    x = torch.zeros(64)

    def draws(fn: Callable[[Tensor], Tensor], seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [fn(x), fn(x), torch.randn(4)]

    for seed in (1, 2, 1):
        expected = draws(lambda x: x + torch.randn_like(x), seed)
        assert all(map(torch.equal, draws(run, seed), expected))
    assert run.outcome.kind is Kind.REPLAYED


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inference_mode_and_autocast(mode: Callable[[], Any]) -> None:
    module = nn.Linear(3, 3).requires_grad_(False).eval()
    run = Harness(lambda x: module(x), modules=lambda: {"net": module})
    for _ in range(2):
        with mode():
            assert torch.equal(run(X), module(X))
            with torch.autocast("cpu", torch.bfloat16):
                value = run(X)
                assert value.dtype == torch.bfloat16
                assert torch.equal(value, module(X))
    assert torch.equal(run(X), module(X))


@pytest.mark.parametrize("enabled", [True, False])
def test_c05_the_collector_is_as_before(enabled: bool) -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        y = x + 1
        gc.collect()
        return y * 2

    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        for size in range(1, 5):
            run = Harness(f, max_entries=2)
            run.cycle = run  # type: ignore[attr-defined]
            x = torch.ones(size)
            assert torch.equal(run(x), x * 4)
            assert run.outcome.kind is Kind.CAPTURED
            assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert seen[2] is False  # warm-up twice, then the capture


def test_a_region_that_calls_another_is_one_graph() -> None:
    inner = Harness(lambda x: x * 2)
    outer = Harness(lambda x: inner(x) + 1, backend=inner.backend)
    assert torch.equal(outer(X), X * 2 + 1)
    assert inner.outcome.reason is Reason.NESTED_CAPTURE
    assert outer.outcome.kind is Kind.CAPTURED
    assert torch.equal(outer(X + 1), X * 2 + 3)


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_a_change_found_after_the_launch_undoes_the_replay(outputs: str) -> None:
    """A layer was replaced, then a hook added: the call counts once, its random numbers too."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).eval().requires_grad_(False)
    run = Harness(
        lambda x: net(x) + torch.randn_like(x), modules=lambda: {"net": net}, options={"outputs": outputs}
    )
    seen: list[torch.Tensor] = []

    def step(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [call(X).clone(), torch.randn(2)]

    def eager(x: torch.Tensor) -> torch.Tensor:
        return net(x) + torch.randn_like(x)

    run(X)
    assert all(map(torch.equal, step(run), step(eager)))
    assert run.outcome.kind is Kind.REPLAYED
    net[1] = nn.Linear(3, 3).eval().requires_grad_(False)
    assert all(map(torch.equal, step(run), step(eager)))
    assert run.outcome.kind is Kind.CAPTURED
    hook = net[0].register_forward_hook(lambda *_: seen.append(X))
    ours = step(run)
    assert run.outcome.reason is Reason.FORWARD_HOOK
    assert len(seen) == 1
    hook.remove()
    assert all(map(torch.equal, ours, step(eager)))
