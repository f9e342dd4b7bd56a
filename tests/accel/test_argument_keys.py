"""A call like an earlier one has its key without being described anew, and nothing else has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_harness import CPU, Harness
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accel.graphs import argument_keys
from accel.graphs.argument_keys import ArgumentKeys
from accel.graphs.arguments import NamedArguments
from accel.record import Kind


def f(x: Tensor, a: Tensor) -> Tensor:
    return x * 10 + a


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def keys() -> ArgumentKeys:
    return ArgumentKeys(NamedArguments(f), CPU)


@pytest.fixture
def descriptions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every description."""
    made: list[Any] = []

    def counting(value: Any, **options: Any) -> Any:
        made.append(value)
        return flatten(value, **options)

    flatten = argument_keys.flatten
    monkeypatch.setattr(argument_keys, "flatten", counting)
    return made


def described(x: Any, a: Any) -> Any:
    return ArgumentKeys(NamedArguments(f), CPU).of_call((x, a), {}, None)


def check(keys: ArgumentKeys, x: Any, a: Any) -> None:
    """The key and the tensors are what a description gives."""
    key, tensors = keys.of_call((x, a), {}, None)
    expected_key, expected_tensors = described(x, a)
    assert key == expected_key
    assert list(map(id, tensors)) == list(map(id, expected_tensors))


def test_a_like_call_is_not_described_anew(keys: ArgumentKeys, descriptions: list[Any]) -> None:
    # Names sort the other way round than places.
    for _ in range(3):
        for rows in (2, 3):
            _, tensors = keys.of_call((torch.rand(rows, 2), torch.rand(2)), {}, None)
            assert [tensor.shape for tensor in tensors] == [(2,), (rows, 2)]
    assert len(descriptions) == 2
    for rows in range(10, 30):  # what is remembered is bounded
        keys.of_call((torch.rand(rows, 2), torch.rand(2)), {}, None)
    keys.of_call((torch.rand(2, 2), torch.rand(2)), {}, None)
    assert len(descriptions) == 23


def misaligned(*shape: int) -> Tensor:
    return torch.rand(shape[0] * shape[1] + 1)[1:].view(shape)


class Own(Tensor):
    """Another type."""


UNLIKE: dict[str, Callable[[], Tensor]] = {
    "shape": lambda: torch.rand(4, 3),
    "dtype": lambda: torch.rand(3, 4, dtype=torch.float64),
    "strides": lambda: torch.rand(4, 3).t(),
    "expanded": lambda: torch.rand(1, 4).expand(3, 4),
    "alignment": lambda: misaligned(3, 4),
    "one more dimension": lambda: torch.rand(1, 3, 4),
    "grad": lambda: torch.rand(3, 4, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.rand(3, 4)),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_call_that_differs_has_the_key_of_its_own(keys: ArgumentKeys, kind: str) -> None:
    a = torch.rand(3, 4)
    for _ in range(2):
        check(keys, torch.rand(3, 4), a)
        check(keys, UNLIKE[kind](), a)
        check(keys, a, UNLIKE[kind]())
        check(keys, a, a)  # one tensor twice
        check(keys, 2.0, a)
        with torch.inference_mode():
            check(keys, torch.rand(3, 4), a)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(3, 4).to_sparse(),
        lambda: torch._neg_view(torch.rand(3, 4)),
        lambda: torch.rand(3, 4).as_subclass(Own),
        lambda: torch.rand(3, 4, device="meta"),
    ],
)
def test_what_a_description_refuses_is_refused_after_a_like_call(
    keys: ArgumentKeys, make: Callable[[], Tensor]
) -> None:
    a = torch.rand(3, 4)
    check(keys, torch.rand(3, 4), a)
    with pytest.raises(Exception, match="x: ") as refusal:
        keys.of_call((make(), a), {}, None)
    with pytest.raises(type(refusal.value)) as expected:
        described(make(), a)
    assert str(refusal.value) == str(expected.value)


def test_a_default_that_comes_in_as_an_argument_is_seen() -> None:
    default = torch.rand(3, 4)

    def g(x: Tensor, a: Tensor = default) -> Tensor:
        return x + a

    keys = ArgumentKeys(NamedArguments(g), CPU)
    for x in (torch.rand(3, 4), default, torch.rand(3, 4)):
        for _ in range(2):
            _, tensors = keys.of_call((x,), {}, None)
            assert len(tensors) == (1 if x is default else 2)


def test_a_wrong_call_raises_what_the_function_raises(keys: ArgumentKeys) -> None:
    a = torch.rand(3, 4)
    check(keys, torch.rand(3, 4), a)
    for args, kwargs in (((a,), {}), ((a, a, a), {}), ((a, a), {"x": a}), ((), {})):
        with pytest.raises(TypeError):
            keys.of_call(args, kwargs, None)


def test_nothing_is_kept_alive_and_no_mode_sees_a_look(keys: ArgumentKeys) -> None:
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, a = torch.rand(3, 4), torch.rand(4)
    with Watching():
        for _ in range(2):
            keys.of_call((x, a), {}, None)
    assert seen == []
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None


def test_without_the_private_part_of_torch_every_call_is_described(
    keys: ArgumentKeys, descriptions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argument_keys, "_TensorGuards", None)
    for _ in range(3):
        keys.of_call((torch.rand(3, 4), torch.rand(4)), {}, None)
    assert len(descriptions) == 3


@pytest.mark.parametrize("answer", [True, False, None])
def test_a_torch_whose_private_part_changed_is_not_trusted(
    answer: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert argument_keys._proven_guards() is not None

    def guards(*tensors: Tensor, **options: Any) -> Any:
        if answer is None:
            raise TypeError("other arguments")
        return SimpleNamespace(check=lambda *args: answer)

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", guards)
    assert argument_keys._proven_guards() is None


def test_graphs_serve_like_calls_with_their_own_values(descriptions: list[Any]) -> None:
    run = Harness(f)
    run(torch.rand(3, 4), torch.rand(4))
    descriptions.clear()
    for _ in range(3):
        x, a = torch.rand(3, 4), torch.rand(4)
        assert torch.equal(run(x, a), f(x, a))
        assert run.outcome.kind is Kind.REPLAYED
    assert descriptions == []
