"""Whole-region graphs: failures, refusals and bounds end in eager, for a named reason."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_harness import Harness, X
from torch import Tensor, nn

from accel.graphs.backend import CaptureFailedError
from accel.graphs.capture import RunEagerError
from accel.graphs.recording import RecordedGraph, RecordingBackend
from accel.record import Kind, Outcome, Reason


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("on_full", ["eager", "evict"])
def test_c02_a_constant_that_always_differs_ends_in_eager(
    on_full: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Harness(lambda x, g: x * g, max_entries=4, on_full=on_full)
    with caplog.at_level(logging.WARNING, "samebit"):
        for i in range(50):
            assert torch.equal(run(X, g=i / 50), X * (i / 50))
            assert len(run.graph) <= 4
    assert run.backend.captures <= 12
    assert run.outcome.reason is Reason.CACHE_FULL
    assert len(caplog.messages) == 1
    assert "g took 5 values while all else was equal (0.0, 0.02, 0.04, 0.06, 0.08)" in caplog.messages[0]
    assert "pass it as a tensor" in caplog.messages[0]


def test_modules_in_the_wrong_state_run_eager_by_name() -> None:
    module = nn.Sequential(nn.Linear(3, 3)).requires_grad_(False).eval()
    run = Harness(lambda x: module(x), modules=lambda: {"net": module})
    module[0].train()
    run(X)
    assert (run.outcome.reason, run.outcome.detail) == (Reason.TRAINING_MODE, "net.0")
    module.eval()
    hook = module[0].register_forward_hook(lambda *_: None)
    run(X)
    assert (run.outcome.reason, run.outcome.detail) == (Reason.FORWARD_HOOK, "net.0")
    hook.remove()
    run(X)
    assert run.outcome.kind is Kind.CAPTURED
    weight = module[0].weight
    module[0].weight = nn.Parameter(weight.to("meta"), requires_grad=False)
    run(X)
    assert (run.outcome.reason, run.outcome.detail) == (
        Reason.COMPONENT_OFFLOADED, "net.0.weight is on meta"
    )  # fmt: skip
    assert len(run.graph) == 0
    module[0].weight = nn.Parameter(weight.clone())
    run(X)
    assert run.outcome.kind is Kind.CAPTURED
    with torch.enable_grad():
        assert run(X).requires_grad
    assert run.outcome.reason is Reason.GRAD_ENABLED


def three_steps(x: Tensor) -> Tensor:
    return (x * 2 + 1).sin()


@pytest.mark.parametrize("k", range(3))
def test_a_failure_at_any_operation_leaves_eager_and_nothing_behind(k: int) -> None:
    run = Harness(three_steps, fail_at=k)
    x = X.clone()
    rng = torch.get_rng_state()
    assert torch.equal(run(x), three_steps(X))
    assert torch.equal(x, X)
    assert run.outcome.reason is Reason.CAPTURE_FAILED
    assert f"injected failure at operation {k}: aten::" in run.outcome.detail
    assert torch.equal(run(x), three_steps(X))
    assert run.outcome.reason is Reason.BLOCKED_SIGNATURE
    assert "injected failure" in run.outcome.detail
    assert run.backend.attempts == 1
    assert run.graph.extra_bytes == 0
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_failed_capture_frees_its_tensors() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def f(x: Tensor) -> Tensor:
        y = x + 1
        alive.append(weakref.ref(y))
        return y * 2

    run = Harness(f, fail_at=1)
    run(X)
    assert [ref() for ref in alive] == [None] * len(alive)


def test_c08_reading_a_value_on_the_host_is_named_and_not_tried_again() -> None:
    def f(x: Tensor) -> Tensor:
        value = (x * 2).max().item()
        return x + value

    run = Harness(f)
    for _ in range(20):
        assert run(torch.ones(1)).item() == 3
    assert run.backend.attempts == 1
    assert "value = (x * 2).max().item() (test_whole_graph_refusals.py:" in run.outcome.detail
    assert "aten::_local_scalar_dense" in run.outcome.detail


def test_three_signatures_that_fail_alike_end_capturing() -> None:
    run = Harness(lambda x: x + x.sum().item())
    for size in range(1, 8):
        x = torch.ones(size)
        assert torch.equal(run(x), x + size)
    assert run.backend.attempts == 3
    assert "3 signatures failed alike" in run.outcome.detail


def test_c06_a_spoiled_capture_is_tried_once_more() -> None:
    backend, disturbed = RecordingBackend(), True

    def record(fn: Any, pool: Any) -> Any:
        if disturbed:
            raise CaptureFailedError(RuntimeError("previous error during capture"), spoiled=True)
        return backend.capture(fn, pool)

    run = Harness(lambda x: x + 1, backend=backend, options={"record": record})
    assert torch.equal(run(X), X + 1)
    assert run.outcome.reason is Reason.CAPTURE_FAILED
    disturbed = False
    run(X)
    assert run.outcome.kind is Kind.CAPTURED


def test_a_constant_that_varies_along_with_a_shape_is_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    run = Harness(lambda x, n, flag: x[:n] if flag else x, max_entries=16)
    with caplog.at_level(logging.WARNING, "samebit"):
        for n in range(1, 9):
            for flag in (True, False):
                run(torch.ones(n), n, flag)
    assert caplog.messages == []
    assert run.backend.captures == 16


def test_a_region_that_may_not_capture_says_how_the_call_differs() -> None:
    run = Harness(lambda x: x + 1)
    run(torch.ones(4))
    run.graph.allow_capture = False
    assert torch.equal(run(torch.ones(6)), torch.full((6,), 2.0))
    assert run.outcome == Outcome(Kind.EAGER, Reason.NOT_WARMED, "x: shape (6,) vs (4,)")
    assert torch.equal(run(torch.ones(4)), torch.full((4,), 2.0))
    assert run.outcome.kind is Kind.REPLAYED


def test_a_guard_that_fails_costs_its_graph_only_that_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    def guarded(graph: RecordedGraph) -> None:
        replay(graph)  # random numbers were drawn by the time the guard speaks
        raise RunEagerError(Reason.GUARD_FAILED, "3 tokens vs 4")

    run, replay = Harness(noisy), RecordedGraph.replay
    run(X)
    torch.manual_seed(7)
    expected = [noisy(X), noisy(X)]
    torch.manual_seed(7)
    with monkeypatch.context() as patch:
        patch.setattr(RecordedGraph, "replay", guarded)
        values = [run(X)]
        assert run.outcome == Outcome(Kind.EAGER, Reason.GUARD_FAILED, "3 tokens vs 4")
    values.append(run(X))
    assert run.outcome.kind is Kind.REPLAYED
    assert all(map(torch.equal, values, expected))


def test_running_out_of_memory_is_reported_and_survived() -> None:
    full = True

    def f(x: Tensor) -> Tensor:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x + 1

    run = Harness(f)
    with pytest.raises(torch.OutOfMemoryError):
        run(X)  # eager needs the memory as well
    full = False
    assert torch.equal(run(X), X + 1)
    assert run.outcome.reason is Reason.BLOCKED_SIGNATURE
    assert "oom" in run.outcome.detail


def test_an_error_of_the_region_is_the_caller_s() -> None:
    run = Harness(lambda a, b: a @ b)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(X, X)
    assert torch.equal(run(X, X.t()), X @ X.t())
    assert run.outcome.kind is Kind.CAPTURED
    with pytest.raises(TypeError, match="missing"):
        run(X)


def test_c09_least_recently_replayed_goes_first() -> None:
    run = Harness(lambda x: x + 1, max_entries=2, on_full="evict")
    sizes = {n: torch.ones(n) for n in (4, 5, 6)}
    kinds = []
    for n in (4, 5, 4, 6, 4, 5):
        assert torch.equal(run(sizes[n]), sizes[n] + 1)
        kinds.append(run.outcome.kind)
    c, r = Kind.CAPTURED, Kind.REPLAYED
    assert kinds == [c, c, r, c, r, c]
    assert run.graph.evictions == 2
    assert run.backend.reserved_bytes() == run.graph.extra_bytes


def test_c09_many_sizes_stay_bounded_and_say_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    run = Harness(lambda x: x * 2, max_entries=2, on_full="evict")
    with caplog.at_level(logging.WARNING, "samebit"):
        for _ in range(10):
            for size in (512, 768, 1024):
                for _ in range(2):
                    assert torch.equal(run(torch.ones(size)), torch.full((size,), 2.0))
                    assert len(run.graph) <= 2
    assert len(caplog.messages) == 1
    video = Harness(lambda latents: latents + 1, max_entries=1)
    video(torch.zeros(1, 81, 4))
    video(torch.zeros(1, 17, 4))
    assert video.outcome.reason is Reason.CACHE_FULL
    assert video.outcome.detail == "latents: shape (1, 17, 4) vs (1, 81, 4)"


def test_details_stay_bounded() -> None:
    run, details = Harness(lambda x, g: x * g, max_entries=1), set()
    for i in range(100):
        run(X, i)
        details.add(run.outcome.detail)
    assert len(details) < 12


def test_the_canary_catches_a_constant_baked_in_at_capture() -> None:
    class Counting:
        calls = 0

        def f(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + self.calls

    run = Harness(Counting().f)
    run(X)
    assert run.outcome.reason is Reason.CANARY_MISMATCH
    assert "output 0 at [0, 0]" in run.outcome.detail
    run(X)
    assert run.outcome.reason is Reason.BLOCKED_SIGNATURE


def test_the_canary_catches_a_memo_of_the_first_input() -> None:
    memo: dict[int, Tensor] = {}
    run = Harness(lambda x: memo.setdefault(id(x), x * 2) + 1)
    for x in (X, X + 5):
        assert torch.equal(run(x), x * 2 + 1)
        assert run.outcome.kind is Kind.EAGER
    assert run.outcome.reason is Reason.BLOCKED_SIGNATURE


def test_writing_into_an_argument_is_refused_by_name() -> None:
    run = Harness(lambda x, noise: x + noise.clamp_(-1, 1))
    noise = torch.full_like(X, 0.5)
    assert torch.equal(run(X, noise), X + 0.5)
    assert run.outcome.reason is Reason.UNSUPPORTED_INPUT
    assert run.outcome.detail.startswith("noise: written in place")
    large = torch.full_like(X, 3.0)
    assert torch.equal(run(X, large), X + 1)
    assert large.eq(1).all()


def test_values_no_graph_can_take_run_eager_by_name() -> None:
    def f(x: Tensor, cond: Any = None) -> Tensor:
        return torch.randn(x.shape, generator=cond) if isinstance(cond, torch.Generator) else x + 1

    run = Harness(f)
    generator = torch.Generator().manual_seed(5)
    first = run(X, generator)
    assert torch.equal(first, f(X, torch.Generator().manual_seed(5)))
    assert run.outcome.reason is Reason.UNSUPPORTED_INPUT
    assert run.outcome.detail.startswith("cond: random generator")
    run(X, {"a": [{1}]})
    assert run.outcome.detail.startswith("cond['a'][0]: set is not hashable")
    out = Harness(lambda x: {"a": object(), "b": x + 1})
    out(X)
    assert out.outcome.reason is Reason.UNSUPPORTED_OUTPUT
    assert out.outcome.detail.startswith("output['a']: object")


def test_close_frees_and_capturing_goes_on() -> None:
    run = Harness(lambda x: x + 1)
    run(X)
    assert run.graph.extra_bytes > 0
    run.graph.close()
    assert (len(run.graph), run.graph.extra_bytes, run.backend.reserved_bytes()) == (0, 0, 0)
    assert torch.equal(run(X), X + 1)
    assert run.outcome.kind is Kind.CAPTURED


def test_a_gate_that_closes_drops_the_graphs_that_hold_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = 0
    monkeypatch.setattr("accel.graphs.whole.fusion_epoch", lambda: epoch)
    run = Harness(lambda x: x + 1)
    run(X)
    epoch = 1
    run(X)
    assert run.outcome.kind is Kind.CAPTURED
    assert len(run.graph) == 1


def test_weights_that_move_on_every_call_end_in_eager() -> None:
    module = nn.Linear(3, 3).requires_grad_(False).eval()
    run = Harness(lambda x: module(x), modules=lambda: {"net": module}, max_entries=2)
    for _ in range(20):
        module.weight = nn.Parameter(module.weight.clone(), requires_grad=False)
        assert torch.equal(run(X), module(X))
    assert run.backend.captures == 6
    assert run.outcome.reason is Reason.CACHE_FULL


def test_a_replay_that_fails_switches_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: RecordedGraph) -> None:
        raise RuntimeError("launch failed")

    run = Harness(lambda x: x + 1)
    run(X)
    with monkeypatch.context() as patch:
        patch.setattr(RecordedGraph, "replay", fail)
        assert torch.equal(run(X), X + 1)
    assert run.outcome.reason is Reason.REPLAY_FAILED
    assert torch.equal(run(X * 2), X * 2 + 1)
    assert run.outcome.reason is Reason.BLOCKED_SIGNATURE
    assert len(run.graph) == 0
