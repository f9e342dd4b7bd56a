"""Keys of calls: what makes two calls the same to a graph, and how a difference reads."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from accel.graphs.arguments import NamedArguments
from accel.graphs.signature import Environment, Signature, differences
from accel.graphs.tree import MAX_LEAVES, UnsupportedValueError, flatten

CPU = torch.device("cpu")
X = torch.arange(6.0).reshape(2, 3)


@dataclass(frozen=True)
class Conditioning:
    text: torch.Tensor
    scale: float = 1.0


class Mode(enum.Enum):
    COND = 1
    UNCOND = 2


def signature(**arguments: Any) -> Signature:
    return Signature(flatten(arguments, device=CPU)[0], Environment.current("cpu"), frozenset())


SAME = [
    (dict(a=X), dict(a=X + 1)),
    (dict(c={"p": X, "q": 1}), dict(c={"q": 1, "p": X.clone()})),
    (dict(c=Conditioning(X)), dict(c=Conditioning(X + 2))),
    (dict(t=torch.arange(4.0)[1:2]), dict(t=torch.arange(4.0)[2:3])),
    (dict(g=float("nan")), dict(g=float("nan"))),
    (dict(m=Mode.COND), dict(m=Mode.COND)),
]
DIFFERENT = [
    (dict(a=X), dict(a=X.bfloat16()), "a: dtype"),
    (dict(a=X), dict(a=X[:, :2].clone()), "a: shape (2, 3) vs (2, 2)"),
    (dict(a=X), dict(a=X.t().contiguous().t()), "a: stride (3, 1) vs (1, 2)"),
    (dict(a=torch.zeros(8)[:4]), dict(a=torch.zeros(8)[1:5]), "a: misalignment"),
    (dict(a=X, b=X), dict(a=X, b=X.clone()), "b: the same tensor"),
    (dict(g=1), dict(g=1.0), "g: 1 vs 1.0"),
    (dict(g=1), dict(g=True), "g: 1 vs True"),
    (dict(g=0.0), dict(g=-0.0), "g: 0.0 vs -0.0"),
    (dict(m=None), dict(m=X), "m: None vs tensor (2, 3)"),
    (dict(m=Mode.COND), dict(m=Mode.UNCOND), "m: "),
    (dict(c=(1, 2)), dict(c=[1, 2]), "container types"),
    (dict(c={"p": X}), dict(c={"p": X, "extra": X}), "c['extra']: missing"),
    (dict(c=Conditioning(X)), dict(c=Conditioning(X, 2.0)), "c.scale: 1.0 vs 2.0"),
    (dict(d=torch.float32), dict(d=torch.float16), "d: "),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_calls_that_share_a_graph(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert signature(**one) == signature(**other)
    assert hash(signature(**one)) == hash(signature(**other))


@pytest.mark.parametrize(("one", "other", "words"), DIFFERENT)
def test_calls_that_differ_say_how(one: dict[str, Any], other: dict[str, Any], words: str) -> None:
    first, second = signature(**one), signature(**other)
    assert first != second
    assert any(line.startswith(words) or words in line for line in differences(first, second))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"gen": torch.Generator()}, "['gen']: random generator"),
        ([{1, 2}], "[0]: set is not hashable"),
        ([torch.nn.Identity()], "[0]: Identity"),
        ([object()], "[0]: object is compared by identity"),
        ([torch.eye(2).to_sparse()], "sparse"),
        ([torch.complex(X, X).conj()], "lazy view"),
        ([X._neg_view()], "lazy view"),
        ([X.flatten().as_strided((3, 2), (1, 1))], "overlaps itself"),
        ([X.to("meta")], "tensor on meta, expected cpu"),
        (list(range(MAX_LEAVES + 1)), "leaves"),
    ],
)
def test_refuses_what_it_cannot_compare(value: Any, words: str) -> None:
    with pytest.raises(UnsupportedValueError) as raised:
        flatten(value, device=CPU)
    assert words in str(raised.value)


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="deeply"):
        flatten(loop, device=CPU)


def test_switches_that_choose_kernels_count() -> None:
    plain = signature(a=X)
    with torch.autocast("cpu", torch.bfloat16):
        cast = signature(a=X)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        math = signature(a=X)
    with torch.device("cpu"):
        placed = signature(a=X)
    torch.use_deterministic_algorithms(True)
    try:
        deterministic = signature(a=X)
    finally:
        torch.use_deterministic_algorithms(False)
    assert signature(a=X) == plain
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        precision = signature(a=X)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len({plain, cast, math, placed, deterministic, precision}) == 6
    assert differences(cast, plain) == ["autocast: True vs False"]


def test_sites_that_may_fuse_count() -> None:
    plain = signature(a=X)
    fused = plain._replace(fused=frozenset({"swiglu"}))
    assert fused != plain
    assert differences(fused, plain) == ["fused sites: ['swiglu'] vs []"]


def mixed(a: Any, b: Any = 2, *, c: Any, d: Any = 4) -> Any: ...


def test_arguments_have_one_form_however_they_are_passed() -> None:
    named = NamedArguments(mixed)
    expected = {"a": 1, "b": 2, "c": 3, "d": 4}
    for args, kwargs in [((1,), {"c": 3}), ((), {"d": 4, "c": 3, "a": 1}), ((1, 2), {"c": 3, "d": 4})]:
        values = named.bind(args, kwargs)
        assert list(values.items()) == list(expected.items())
    free = NamedArguments(lambda a, *rest, **more: (a, rest, more))
    values = free.bind((1, 2, 3), {"k": 4})
    assert values == {"a": 1, "rest": (2, 3), "more": {"k": 4}}
    assert free.call(values) == (1, (2, 3), {"k": 4})


WRONG: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {"c": 1}),
    ((1,), {}),
    ((1, 2, 3), {"c": 1}),
    ((1,), {"a": 1, "c": 1}),
    ((1,), {"c": 1, "e": 1}),
]


@pytest.mark.parametrize(("args", "kwargs"), WRONG)
def test_wrong_arguments_are_refused_as_by_the_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        mixed(*args, **kwargs)
    with pytest.raises(TypeError):
        NamedArguments(mixed).bind(args, kwargs)
