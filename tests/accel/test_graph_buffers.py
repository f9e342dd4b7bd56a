"""What is copied in and out: results as copies or views, inputs that change rarely, keys of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_harness import Harness, X
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel.graphs import buffers
from accel.graphs.buffers import StaticInputs
from accel.record import Kind, Outcome, Reason

VIEW = {"outputs": "view"}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_views_are_the_graph_s_own_tensors_and_copies_are_not() -> None:
    def f(x: Tensor) -> dict[str, Tensor]:
        return {"y": x + 1}

    view, clone = Harness(f, options=VIEW), Harness(f)
    first, second = view(X), view(X * 2)
    assert first["y"] is second["y"]
    assert first is not second
    assert torch.equal(second["y"], X * 2 + 1)
    kept, later = clone(X), clone(X * 2)
    assert torch.equal(kept["y"], X + 1)
    assert torch.equal(later["y"], X * 2 + 1)


def test_a_chain_of_views_gives_what_the_plain_loop_gives() -> None:
    def step(a: Tensor, b: Tensor, flip: bool) -> tuple[Tensor, Tensor, Tensor]:
        return (b, a, a - b) if flip else (a * 0.5, b + a, a - b)

    run = Harness(step, options=VIEW)
    ours = theirs = (X.clone(), X * 3)
    # With `flip` the fixed inputs themselves come out, swapped, and go back in.
    for flip in (False, True, True, False, True, False, False, True, True, True):
        ours, theirs = run(*ours[:2], flip)[:2], step(*theirs[:2], flip)[:2]
        assert all(map(torch.equal, ours, theirs))
    assert run.outcome.kind is Kind.REPLAYED


def scaled(x: Tensor, context: Tensor) -> Tensor:
    return x * context


class Counting(TorchDispatchMode):
    """Counts calls that copy."""

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += "copy_" in str(func)
        return func(*args, **(kwargs or {}))


PERSISTENT = {"persistent": ("context",)}


def copies_of(run: Harness) -> int:
    """How often the fixed buffer of `context` was written to."""
    (entry,) = run.graph._cache.entries()
    return entry.inputs.versions()[0]


def test_a_persistent_input_is_copied_when_it_changed() -> None:
    run, context = Harness(scaled, options=PERSISTENT), torch.full_like(X, 2.0)

    def check(context: Tensor, copied: int) -> None:
        before = copies_of(run)
        assert torch.equal(run(X, context), X * context)
        assert copies_of(run) - before == copied

    run(X, context)
    for _ in range(3):
        check(context, 0)
    context.mul_(3)
    check(context, 1)
    context[0, 0] = 9  # through a view
    check(context, 1)
    check(context, 0)
    context.data = torch.full_like(X, 5.0)
    check(context, 1)
    other = context.clone()
    check(other, 1)
    check(context, 1)
    del other
    for value in range(4):  # new tensors, perhaps at the address and with the id of the last one
        check(torch.full_like(X, value), 1)


def test_tensors_without_a_version_need_a_token() -> None:
    with torch.inference_mode():
        run, context = Harness(scaled, options=PERSISTENT), torch.full_like(X, 2.0)
        run(X, context)
        before = copies_of(run)
        context.fill_(4)
        assert torch.equal(run(X, context), X * 4)
        assert copies_of(run) == before + 1
        for token, copied in (("a", 1), ("a", 0), ("b", 1), ("b", 0), ("a", 1)):
            before = copies_of(run)
            context = torch.full_like(X, ord(token))
            assert torch.equal(run.vouched(X, context, tokens={"context": token}), X * context)
            assert copies_of(run) - before == copied
        assert torch.equal(run(X, X), X * X)
        assert torch.equal(run.vouched(X, context, tokens={"context": "a"}), X * context)


def test_inputs_that_changed_are_one_launch_with_the_others_of_their_dtype() -> None:
    tensors = [X, X * 2, X * 3, X.to(torch.int64)]
    inputs = StaticInputs(tensors, persistent={1: ("a",), 2: ("b",)})

    def launches(**tokens: int) -> int:
        with Counting() as counting:
            inputs.fill(tensors, tokens)
        assert all(map(torch.equal, inputs.buffers, tensors))
        return counting.copies

    assert launches(a=1, b=1) == 2
    assert launches(a=1, b=2) == 2
    assert launches(a=1, b=2) == 2


def test_a_copy_that_was_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = StaticInputs([X], persistent={0: ("x",)})
    changed = X + 1
    inputs.fill([X], {"x": 1})

    def interrupted(pairs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(buffers, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            inputs.fill([changed], {"x": 2})
    inputs.fill([changed], {"x": 2})
    assert torch.equal(inputs.buffers[0], changed)


def test_results_of_graphs_are_never_taken_for_unchanged() -> None:
    source = Harness(lambda x: (x + 1, x), options=VIEW)
    consumer = Harness(scaled, options=PERSISTENT)
    for factor in (1.0, 2.0, 3.0, 3.0):
        y, same = source(X * factor)
        assert torch.equal(consumer(X, y), X * (X * factor + 1))
        assert torch.equal(consumer(X, y[:]), X * (X * factor + 1))
        assert torch.equal(consumer(X, same), X * (X * factor))


def test_a_tensor_that_is_also_an_ordinary_argument_is_always_copied() -> None:
    run = Harness(lambda a, context: a + context, options=PERSISTENT)
    x = X.clone()
    run(x, x)
    x.data.mul_(2)  # not counted
    assert torch.equal(run(x, x), x + x)


def test_a_sealed_key_stands_for_the_arguments() -> None:
    run = Harness(lambda x, scale: x["a"] * scale + x["b"])
    x = {"a": X, "b": X + 1}
    outcomes = []
    for key, scale in (("two", 2), ("two", 2), ("three", 3), ("two", 2)):
        value = {name: tensor * scale for name, tensor in x.items()}
        assert torch.equal(run.vouched(value, scale, sealed=key), value["a"] * scale + value["b"])
        outcomes.append(run.outcome.kind)
    c, r = Kind.CAPTURED, Kind.REPLAYED
    assert outcomes == [c, r, c, r]
    run(x, 2)
    assert run.outcome.kind is c
    run.graph.allow_capture = False
    run.vouched(x, 4, sealed="four")
    assert run.outcome == Outcome(Kind.EAGER, Reason.NOT_WARMED, "sealed key: 'four' vs 'three'")


def test_a_sealed_call_is_still_refused_what_no_graph_can_take() -> None:
    run = Harness(lambda x, g: x + 1)
    run.vouched(X, [{1}], sealed=0)
    assert run.outcome.reason is Reason.UNSUPPORTED_INPUT
    assert run.outcome.detail.startswith("g[0]: set is not hashable")
