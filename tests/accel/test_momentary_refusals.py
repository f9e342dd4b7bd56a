"""Calls that run eager for what the caller or the process is about, while the graph stays for others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from graph_harness import Harness, X

from accel.record import Kind, Reason


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_arguments_that_require_grad_get_it() -> None:
    run = Harness(lambda x: x * 2)
    run(X)
    with torch.enable_grad():
        x = X.clone().requires_grad_()
        run(x).sum().backward()
    assert (run.outcome.kind, run.outcome.reason) == (Kind.EAGER, Reason.GRAD_ENABLED)
    assert torch.equal(x.grad, torch.full_like(X, 2))
    run(x)
    assert run.outcome.kind is Kind.REPLAYED


def test_a_process_among_others_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of other processes can't be waited for in a capture."""
    run = Harness(lambda x: x + 1)
    run(X)
    for world_size, kind in ((2, Kind.EAGER), (1, Kind.REPLAYED)):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=world_size: size)
        assert torch.equal(run(X), X + 1)
        assert run.outcome.kind is kind
        assert run.outcome.reason is (Reason.MULTI_GPU if kind is Kind.EAGER else None)
