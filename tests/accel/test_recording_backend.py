"""The recording backend must show the traps that real graphs have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.graphs.backend import CaptureFailedError
from accel.graphs.recording import RecordingBackend


def test_a_replay_reads_and_writes_the_captured_memory() -> None:
    backend, x = RecordingBackend(), torch.ones(3)
    graph = backend.capture(lambda: {"y": x * 2 + 1}, backend.new_pool())
    y = graph.outputs["y"]
    assert y.isnan().all()  # captured, not run
    graph.replay()
    assert y.eq(3).all()
    x.fill_(5)
    graph.replay()
    assert y.eq(11).all()


def test_python_values_and_replaced_tensors_are_baked_in() -> None:
    backend, x = RecordingBackend(), torch.ones(3)
    held: dict[str, Any] = {"scale": 2.0, "weight": torch.ones(3)}
    graph = backend.capture(lambda: x * held["scale"] + held["weight"], None)
    held["scale"], held["weight"] = 7.0, torch.zeros(3)
    graph.replay()
    assert graph.outputs.eq(3).all()


def test_views_and_in_place_operations_repeat_on_the_same_memory() -> None:
    backend, x, m = RecordingBackend(), torch.arange(3.0), torch.eye(3)

    def f() -> torch.Tensor:
        y = (m @ x).unsqueeze(0)
        y.squeeze_()
        y[1:].mul_(10)
        return y

    graph = backend.capture(f, None)
    for offset in (0, 5):
        x.copy_(torch.arange(3.0) + offset)
        graph.replay()
        assert torch.equal(graph.outputs, f())


def test_random_numbers_advance_with_every_replay() -> None:
    backend = RecordingBackend()
    graph = backend.capture(lambda: torch.randn(4), None)
    state = backend.rng_state()
    graph.replay()
    first = graph.outputs.clone()
    graph.replay()
    assert not torch.equal(graph.outputs, first)
    backend.set_rng_state(state)
    assert torch.equal(torch.randn(4), first)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    "fn", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: bool(x.sum())]
)
def test_waiting_for_the_device_is_not_permitted(fn: object, mode: Any) -> None:
    backend, x = RecordingBackend(), torch.ones(3)
    with mode(), pytest.raises(CaptureFailedError, match=r"not permitted.*aten::"):
        backend.capture(lambda: fn(x), None)  # type: ignore[operator]
    assert not backend.is_capturing()
    assert (backend.attempts, backend.captures) == (1, 0)


def test_failures_are_injected_at_the_operation_asked_for() -> None:
    backend, x = RecordingBackend(fail_at=1), torch.ones(3)
    with pytest.raises(CaptureFailedError, match="operation 1: aten::mul"):
        backend.capture(lambda: (x + 1) * 2, None)


def test_released_graphs_hold_no_memory() -> None:
    backend, x = RecordingBackend(), torch.ones(1000)
    graph = backend.capture(lambda: x + 1, None)
    assert backend.reserved_bytes() == 4000
    graph.release()
    assert backend.reserved_bytes() == 0


@torch.inference_mode()
def test_operations_that_sometimes_copy_are_replayed_when_they_do() -> None:
    """`reshape` is declared as a view, and copies here."""
    backend, x = RecordingBackend(), torch.arange(6.0).view(2, 3)
    graph = backend.capture(lambda: x.t().reshape(-1) + x.reshape(-1), backend.new_pool())
    x.copy_(torch.arange(6.0, 12.0).view(2, 3))
    graph.replay()
    assert torch.equal(graph.outputs, x.t().reshape(-1) + x.reshape(-1))
