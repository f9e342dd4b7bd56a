"""What a call of a site costs the host, on tensors so small that the GPU waits for it.

Run with `python -m pytest tests/gpu/test_launch_cost_gpu.py -m gpu -s`; `-s` shows the times.
"""

import statistics
import time
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
from test_kernels_gpu import arguments, randn

from accel.fusion.gate import Gate
from accel.fusion.launch import Launch
from accel.fusion.registry import get
from accel.site_names import SITE_NAMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CALLS, ROUNDS = 100, 15


@pytest.mark.parametrize("site", SITE_NAMES)
def test_a_fused_call_costs_the_host_hardly_more_than_eager(site, monkeypatch):
    """Prints host time of a call in eager, fused, and fused with Triton's own launch."""
    gate, args = Gate(get(site)), small_arguments(site)
    for _ in range(2):  # verified, planned
        assert gate.run(*args)[1].fused
    calls = {"eager": lambda: get(site).reference(*args), "fused": lambda: gate.run(*args)}
    times = host_microseconds(calls)
    monkeypatch.setattr(Launch, "__call__", launched_by_triton)
    slow = host_microseconds({"fused": calls["fused"]})["fused"]
    print(
        f"\n{site:28s} eager {times['eager']:6.1f} us, fused {times['fused']:5.1f} us, by Triton {slow:5.1f}",
        end="",
    )
    assert times["fused"] < 1.25 * times["eager"]


def small_arguments(site: str):
    if site == "group_norm_silu":
        return randn(1, 64, 16, 32), 32, randn(64), randn(64), 1e-6
    if site == "channel_norm_silu":
        return randn(1, 64, 2, 8, 8), 1e-8
    return arguments(site, tokens=32)


def launched_by_triton(self: Launch, *tensors: torch.Tensor | None) -> None:
    self._kernel[self._grid](*tensors, *self._tail, **self._options)


def host_microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median over rounds in turn; of the calls of a round none waits for the device."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name in calls if turn % 2 == 0 else reversed(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                calls[name]()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(each) for name, each in times.items()}
