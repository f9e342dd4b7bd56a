"""Captures and fallbacks leave the host's generator where plain calls would, whatever the device's does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graph_harness import Harness, X
from segmented_harness import Segmented
from torch import Tensor

from accel.graphs.breaks import graph_break
from accel.graphs.recording import RecordingBackend
from accel.record import Kind, Reason


class OwnGenerator(RecordingBackend):
    """The device's generator is not that of the host, as on CUDA."""

    def rng_state(self) -> Tensor:
        return torch.zeros(1)

    def set_rng_state(self, state: Tensor) -> None: ...


@graph_break
def host_noise(x: Tensor) -> Tensor:
    return torch.randn(2, 3)


def noisy(x: Tensor) -> Tensor:
    return x * host_noise(x)


def noisy_and_unfit(x: Tensor) -> Tensor:
    return x * torch.randn(2, 3) if x.sum() > 0 else x


def values_of(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    return [*(call(X * n) for n in (1, 2, 3)), torch.randn(2)]


@torch.no_grad()
def test_a_capture_that_fails_draws_nothing_from_the_host() -> None:
    run = Harness(noisy_and_unfit, backend=OwnGenerator())
    assert all(map(torch.equal, values_of(run), values_of(noisy_and_unfit)))
    assert run.outcome.reason is Reason.BLOCKED_SIGNATURE


@torch.no_grad()
@pytest.mark.parametrize("harness", [Segmented, Harness])
def test_random_numbers_of_the_host_go_on_as_in_eager(harness: Callable[..., Harness | Segmented]) -> None:
    run = harness(noisy, backend=OwnGenerator())
    for _ in range(2):
        assert all(map(torch.equal, values_of(run), values_of(noisy)))
        assert run.outcome.kind is Kind.REPLAYED


@torch.no_grad()
def test_a_number_drawn_on_the_host_is_not_baked_in() -> None:
    """Outside of what the backend sees, as host work is in a capture on CUDA."""

    def shifted(x: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            shift = torch.rand(()).item()
        return x + shift

    run = Harness(shifted)
    assert all(map(torch.equal, values_of(run), values_of(shifted)))
    assert run.outcome.reason is Reason.BLOCKED_SIGNATURE
    assert "random numbers" in run.outcome.detail
