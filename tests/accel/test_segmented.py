"""Graphs in segments with declared breaks, on the recording backend."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from segmented_harness import Segmented, record
from torch import Tensor

from accel.graphs.backend import CaptureFailedError
from accel.graphs.breaks import BreakThreadError, call_break, graph_break, replay_token
from accel.graphs.capture import RunEagerError
from accel.graphs.recording import RecordingBackend
from accel.record import Kind, Reason

X = torch.tensor([[1.0, -2, 3], [4, 5, -6]])


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@graph_break
def positive_mean(x: Tensor) -> Tensor:
    """Uncapturable inside: selects by mask."""
    return x[x > 0].mean() + torch.zeros_like(x)


def inputs(count: int = 20) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(2, 3, generator=generator) + 0.5 for _ in range(count))


def assert_same_as_eager(fn: Callable[..., Any], **options: Any) -> Segmented:
    """Every call after the first is replayed and equals eager."""
    run = Segmented(fn, **options)
    results = [(run(x), fn(x), run.kind) for x in inputs()]
    assert all(torch.equal(got, expected) for got, expected, _ in results)
    assert [kind for *_, kind in results] == [Kind.CAPTURED] + [Kind.REPLAYED] * 19
    return run


def test_declared_breaks_give_the_values_of_eager() -> None:
    def f(x: Tensor) -> Tensor:
        y = positive_mean((x * 2).sin())
        z = positive_mean(y + x)
        return z * y

    run = assert_same_as_eager(f)
    line = f.__code__.co_firstlineno
    assert [str(each) for each in run.breaks] == [
        f"test_segmented.py:{line + 1} positive_mean (declared)",
        f"test_segmented.py:{line + 2} positive_mean (declared)",
    ]
    assert run.backend.captures == 3


def test_breaks_at_the_ends_and_next_to_each_other_make_no_empty_segments() -> None:
    def f(x: Tensor) -> Tensor:
        return positive_mean(positive_mean(x) + 1)

    run = assert_same_as_eager(f, max_segments=1)
    assert len(run.breaks) == 2


def test_a_break_inside_a_break_is_part_of_it() -> None:
    @graph_break
    def outer(x: Tensor) -> Tensor:
        return positive_mean(x) * float(x.max())

    run = assert_same_as_eager(lambda x: outer(x + 1) - 1)
    assert [each.op for each in run.breaks] == ["outer"]


def test_a_predicate_decides_whether_a_call_is_captured() -> None:
    @graph_break(when=lambda x, masked: masked)
    def attend(x: Tensor, masked: bool) -> Tensor:
        return x[x > 0].sum() * x if masked else x.softmax(-1)

    assert not assert_same_as_eager(lambda x: attend(x * 2, False) + 1).breaks
    assert len(assert_same_as_eager(lambda x: attend(x * 2, True) + 1).breaks) == 1


def test_a_break_that_writes_into_a_given_tensor_needs_no_buffer() -> None:
    def into(x: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(x[x > 0].sum() * x)

    def f(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        same = call_break(into, x + 1, out=y)
        assert same is y
        return y * 2

    assert_same_as_eager(f)


def test_a_break_may_write_into_its_arguments() -> None:
    def double(each: list[Tensor]) -> None:
        assert len(each) == 1
        each[0].mul_(float(each[0].max()))

    def f(x: Tensor) -> Tensor:
        y = x * 2
        features = [y]
        call_break(double, features)
        features.append(y)  # after the call: no business of it
        return y + 1

    assert_same_as_eager(f)


def test_results_may_be_nested_and_layouts_are_kept() -> None:
    def parts(x: Tensor) -> dict[str, Any]:
        scale = x.abs().max().item()
        return {"t": x.t() * scale, "pair": (x + scale, x[:, 1:]), "n": 3}

    def f(x: Tensor) -> Tensor:
        found = call_break(parts, x * 2)
        a, b = found["pair"]
        return a.sum() + b.sum() + found["t"].reshape(-1) * found["n"]

    assert_same_as_eager(f)


def test_captured_work_may_overwrite_the_result_of_a_break() -> None:
    def f(x: Tensor) -> Tensor:
        return positive_mean(x * 2).add_(x)

    assert_same_as_eager(f)


def test_a_tensor_that_a_break_hands_out_is_not_overwritten() -> None:
    weight = torch.ones(2, 3)

    def f(x: Tensor) -> Tensor:
        return call_break(lambda y: weight if y.max() < 100 else y + 1, x * 2) * x

    run = Segmented(f)
    for x in (X, X + 1000, X, X + 1000):
        assert torch.equal(run(x), f(x))
    assert run.kind is Kind.REPLAYED
    assert weight.eq(1).all()


def test_memory_dropped_before_a_later_break_stays_its_own() -> None:
    def f(x: Tensor) -> Tensor:
        kept = x * 3
        view = kept[0]
        y = positive_mean(kept)
        del kept
        z = call_break(lambda a, b: a + b.sum(), y * 2, view)
        del view
        return positive_mean(z.exp().tanh())

    assert_same_as_eager(f)


def test_what_segments_drop_is_spoiled() -> None:
    """The pool of the recording backend does reuse memory, or the test above would prove nothing."""
    kept: list[Tensor] = []

    def f() -> Tensor:
        y = X * 2
        kept.append(y.untyped_storage())  # type: ignore[arg-type]
        z = y + 1
        del y
        return z

    graph = record(f)
    graph.replay()
    assert torch.equal(graph.outputs, X * 2 + 1)
    spoiled = torch.empty(0).set_(kept[0])  # type: ignore[call-overload]
    assert spoiled.isnan().all()


@pytest.mark.parametrize("change", ["shape", "dtype", "stride", "constant", "structure"])
def test_a_result_of_another_form_runs_that_call_eager(change: str) -> None:
    def body(x: Tensor) -> Any:
        if x.sum() < 1e3:
            return x + 1, 3
        return {
            "shape": (x[:1] + 1, 3),
            "dtype": ((x + 1).double(), 3),
            "stride": ((x + 1).t().contiguous().t(), 3),
            "constant": (x + 1, 4),
            "structure": [x + 1, 3],
        }[change]

    def f(x: Tensor) -> Tensor:
        y, n = call_break(body, x * 2)
        return y * n

    run = Segmented(f)
    run(X)
    assert torch.equal(run(X + 1e4), f(X + 1e4))
    assert (run.kind, run.reason) == (Kind.EAGER, Reason.GUARD_FAILED)
    expected = {"shape": "shape (1, 3) vs (2, 3)", "dtype": "dtype torch.float64 vs torch.float32"}
    assert expected.get(change, " vs ") in run.outcome.detail
    assert "body: " in run.outcome.detail.replace(" (declared)", "")
    assert torch.equal(run(X + 1), f(X + 1))
    assert run.kind is Kind.REPLAYED


def test_an_error_in_a_break_is_the_caller_s_and_the_graph_stays() -> None:
    def checked(x: Tensor) -> Tensor:
        if x.max() > 100:
            raise ValueError("out of range")
        return x + 1

    def f(x: Tensor) -> Tensor:
        noise = torch.randn(2, 3)
        return call_break(checked, x * 2) + noise

    run = Segmented(f)
    run(X)
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="out of range"):
        run(X * 100)
    after = torch.rand(1)
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="out of range"):
        f(X * 100)
    assert torch.equal(torch.rand(1), after)
    run(X)
    assert run.kind is Kind.REPLAYED


def test_an_error_at_the_recording_leaves_eager() -> None:
    calls = itertools.count()

    def flaky(x: Tensor) -> Tensor:
        if next(calls) == 2:  # after the warm-ups
            raise ValueError("third time")
        return x + 1

    def f(x: Tensor) -> Tensor:
        try:
            return call_break(flaky, x * 2) * 2
        except ValueError:
            return x

    run = Segmented(f)
    assert torch.equal(run(X), (X * 2 + 1) * 2)
    assert run.reason is Reason.CAPTURE_FAILED
    assert "third time" in run.outcome.detail
    assert not run.backend.is_capturing()
    assert run.backend.reserved_bytes() == 0


def breaks_in_a_row(count: int) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        for _ in range(count):
            x = call_break(lambda y: y / (1 + y.abs().max().item()), x * 2)
        return x + 1

    return f


def test_three_hundred_breaks_are_served_and_a_lower_limit_is_named() -> None:
    f = breaks_in_a_row(300)
    run = Segmented(f, max_segments=512)
    for x in inputs(3):
        assert torch.equal(run(x), f(x))
    assert run.kind is Kind.REPLAYED
    assert len(run.breaks) == 300
    few = Segmented(f, max_segments=128)
    assert torch.equal(few(X), f(X))
    assert few.reason is Reason.TOO_MANY_SEGMENTS
    assert "max_segments=128" in few.outcome.detail
    assert few.backend.reserved_bytes() == 0


@pytest.mark.parametrize("k", range(8))
def test_a_failure_at_any_operation_leaves_eager_and_nothing_behind(k: int) -> None:
    def f(x: Tensor) -> Tensor:
        y = positive_mean(x * 2 + 1) + 1
        return (positive_mean(y.sin() - x) * 3).tanh() + float(y.max())

    run, x, rng = Segmented(f, backend=RecordingBackend(fail_at=k)), X.clone(), torch.get_rng_state()
    assert torch.equal(run(x), f(X))
    assert torch.equal(x, X)
    assert run.reason is Reason.CAPTURE_FAILED
    assert f"injected failure at operation {k}" in run.outcome.detail
    assert not run.backend.is_capturing()
    assert (run.graph.extra_bytes, run.backend.reserved_bytes()) == (0, 0)
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(call_break(lambda v: v + 1, X), X + 1)


def test_random_numbers_continue_across_breaks() -> None:
    def f(x: Tensor) -> Tensor:
        y = call_break(lambda v: v + torch.randn(2, 3), x + torch.randn(2, 3))
        return y + torch.randn(2, 3)

    run = Segmented(f)
    for seed in range(4):
        torch.manual_seed(seed)
        got = [run(X), run(X)]
        torch.manual_seed(seed)
        assert all(torch.equal(each, f(X)) for each in got)


def test_all_breaks_of_a_replay_see_one_token_and_every_replay_a_new_one() -> None:
    tokens: list[object] = []

    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = call_break(lambda y: tokens.append(replay_token()) or y + 1, x * 2)  # type: ignore[func-returns-value]
        return x

    graph = record(lambda: f(X))
    graph.replay()
    graph.replay()
    assert [tokens.count(each) for each in tokens] == [3] * 9
    assert len(set(tokens)) == 3


def test_inference_mode_is_served_as_well() -> None:
    with torch.inference_mode():
        assert_same_as_eager(lambda x: positive_mean(x * 2).add_(x) * 2)


def test_autocast_around_a_break_holds_at_replays() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call_break(lambda y: y @ y.t() * y.max().item(), x * 2).float()

    assert_same_as_eager(f)


def test_a_break_in_a_side_stream_is_refused() -> None:
    backend = RecordingBackend()

    def f() -> Tensor:
        y = X + 1
        with backend.side_stream():
            return positive_mean(y)

    with pytest.raises(RunEagerError, match="positive_mean") as caught:
        record(f, backend=backend)
    assert caught.value.outcome.reason is Reason.BREAK_IN_SIDE_STREAM
    assert not backend.is_capturing()


def test_a_break_in_a_thread_of_the_region_is_refused() -> None:
    raised: list[BaseException] = []
    unrelated = torch.ones(2, 3)

    def work(y: Tensor) -> None:
        try:
            positive_mean(y)
        except BreakThreadError as error:
            raised.append(error)

    def f(x: Tensor) -> Tensor:
        y = x * 2
        thread = threading.Thread(target=work, args=(y,))
        thread.start()
        thread.join()
        other = threading.Thread(target=work, args=(unrelated,))
        other.start()
        other.join()
        return y

    record(lambda: f(X))
    assert len(raised) == 1
    assert "positive_mean" in str(raised[0])
    f(X)
    assert len(raised) == 1


def test_a_released_graph_holds_nothing() -> None:
    backend = RecordingBackend()
    graph = record(lambda: positive_mean(X * 2) + 1, backend=backend)
    assert backend.reserved_bytes() > 0
    graph.release()
    assert (backend.reserved_bytes(), graph.outputs) == (0, None)


def test_failures_of_the_function_keep_their_cause() -> None:
    with pytest.raises(CaptureFailedError, match="mat1 and mat2"):
        record(lambda: positive_mean(X @ X))
