"""Whatever sequence of calls comes, every result is that of eager and nothing given out before changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from graph_harness import Harness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from accel.graphs.recording import RecordingBackend
from accel.record import Kind, Reason

settings.register_profile(
    "graphs",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("graphs")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass
class Pair:
    left: Tensor
    right: Tensor


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"left": a, "nested": {"right": b}},
    "dataclass": Pair,
}


def parts(value: Any) -> tuple[Tensor, Tensor]:
    match value:
        case Pair(left, right):
            return left, right
        case {"left": left, "nested": {"right": right}}:
            return left, right
        case [left, right]:
            return left, right
    raise AssertionError(value)


@dataclass(frozen=True)
class Call:
    """One call of a region: what its signature and its content are made from."""

    region: int
    shape: tuple[int, ...]
    container: str
    constant: float | int | None
    transposed: bool
    same: bool
    draws: bool
    value: int

    def arguments(self) -> tuple[Tensor, Any]:
        x = torch.arange(float(torch.Size(self.shape).numel())).reshape(self.shape) + self.value
        if self.transposed:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        other = x if self.same else x * 0.5 - self.value
        return x, CONTAINERS[self.container](x, other)


@dataclass(frozen=True)
class Swap:
    """New weights for a region: another parameter, another storage, or other content in the same one."""

    region: int
    how: str
    scale: int


@dataclass(frozen=True)
class Close:
    region: int


REGIONS = st.integers(0, 1)
CALLS = st.builds(
    Call,
    region=REGIONS,
    shape=st.sampled_from([(2, 3), (3, 3), (1, 3)]),
    container=st.sampled_from(sorted(CONTAINERS)),
    constant=st.sampled_from([None, 1, 1.0, -0.5]),
    transposed=st.booleans(),
    same=st.booleans(),
    draws=st.sampled_from([False, False, True]),
    value=st.integers(0, 5),
)
SWAPS = st.builds(
    Swap, region=REGIONS, how=st.sampled_from(["parameter", "data", "copy"]), scale=st.integers(1, 4)
)
EVENTS = st.lists(st.one_of(CALLS, CALLS, CALLS, SWAPS, st.builds(Close, REGIONS)), min_size=2, max_size=14)


@dataclass
class Region:
    """A function with weights, plain and behind graphs."""

    backend: RecordingBackend
    policy: dict[str, Any]
    net: nn.Linear = field(init=False)
    graphs: Harness = field(init=False)

    def __post_init__(self) -> None:
        self.net = nn.Linear(3, 3, bias=False).requires_grad_(False).eval()
        self.graphs = Harness(
            self.plain, modules=lambda: {"net": self.net}, backend=self.backend, **self.policy
        )

    def plain(self, x: Tensor, pair: Any, constant: float | None, draws: bool) -> dict[str, Any]:
        left, right = parts(pair)
        y = self.net(x)
        if constant is not None:
            y = y * constant + (isinstance(constant, int))
        if draws:
            y = y + torch.randn_like(y)
        return {
            "y": y,
            "pair": [torch.zeros_like(left) if left is right else left - right, x],
            "kind": type(pair).__name__,
        }

    def swap(self, event: Swap) -> None:
        weight = event.scale * torch.eye(3)
        if event.how == "parameter":
            self.net.weight = nn.Parameter(weight, requires_grad=False)
        elif event.how == "data":
            self.net.weight.data = weight
        else:
            self.net.weight.copy_(weight)


def tensors(result: dict[str, Any]) -> list[Tensor]:
    return [result["y"], *result["pair"]]


@given(events=EVENTS, max_entries=st.integers(1, 3), on_full=st.sampled_from(["eager", "evict"]))
def test_any_sequence_of_calls_gives_eager_results(events: list[Any], max_entries: int, on_full: str) -> None:
    backend = RecordingBackend()
    regions = [Region(backend, {"max_entries": max_entries, "on_full": on_full}) for _ in range(2)]
    given_out: list[tuple[Tensor, Tensor]] = []
    for seed, event in enumerate(events):
        region = regions[event.region]
        if isinstance(event, Swap):
            region.swap(event)
        elif isinstance(event, Close):
            region.graphs.graph.close()
        else:
            results = []
            for fn in (region.plain, region.graphs):
                torch.manual_seed(seed)
                x, pair = event.arguments()
                results.append(fn(x, pair, event.constant, event.draws))
                results[-1]["rng"] = torch.get_rng_state()
            expected, actual = results
            assert actual["kind"] == expected["kind"]
            assert torch.equal(actual["rng"], expected["rng"])
            given_out += zip(tensors(actual), [t.clone() for t in tensors(expected)], strict=True)
            assert [t.stride() for t in tensors(actual)] == [t.stride() for t in tensors(expected)]
            assert region.graphs.outcome.reason in (None, Reason.CACHE_FULL)
        assert all(len(r.graphs.graph) <= max_entries for r in regions)
        assert all(torch.equal(actual, expected) for actual, expected in given_out)
    assert backend.reserved_bytes() == sum(region.graphs.graph.extra_bytes for region in regions)


@given(CALLS, st.one_of(CALLS, st.none()))
def test_a_graph_serves_exactly_the_calls_of_its_form(first: Call, second: Call | None) -> None:
    region, second = Region(RecordingBackend(), {}), second or replace(first, value=first.value + 1)

    def form(call: Call) -> tuple[Any, ...]:
        x, pair = call.arguments()
        return x.shape, x.stride(), type(pair), repr(call.constant), call.same, call.draws

    for call in (first, second):
        x, pair = call.arguments()
        region.graphs(x, pair, call.constant, call.draws)
    assert (region.graphs.outcome.kind is Kind.REPLAYED) == (form(first) == form(second))


@settings(max_examples=10)  # a failure is followed by a collection of garbage, which takes its time
@given(st.lists(st.sampled_from(["add", "mul", "sin", "matmul", "cat"]), min_size=1, max_size=6), st.data())
def test_a_failure_at_any_operation_leaves_eager(names: list[str], data: st.DataObject) -> None:
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "add": lambda x: x + 1,
        "mul": lambda x: x * 0.5,
        "sin": torch.sin,
        "matmul": lambda x: x @ x,
        "cat": lambda x: torch.cat([x, x])[:3],
    }

    def f(x: Tensor) -> Tensor:
        for name in names:
            x = operations[name](x)
        return x

    x, rng = torch.eye(3) + 1, torch.get_rng_state()
    kept = x.clone()
    run = Harness(f, fail_at=data.draw(st.integers(0, len(names) - 1)))
    assert torch.equal(run(x), f(x))
    assert run.outcome.reason is Reason.CAPTURE_FAILED
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), rng)
    assert run.graph.extra_bytes == run.backend.reserved_bytes() == 0
    assert torch.equal(run(x), f(x))
    assert run.outcome.reason is Reason.BLOCKED_SIGNATURE
