"""Times of blocks on the device's own clock, and what to say about many of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch


class Lap:
    """Time from its making to `end`, without waiting for the device at either.

    On CUDA both ends are events of the current stream: work pending before does not count, work
    enqueued in between does, and so does the time in which the device waited for the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._mark()
        self._end = self._begin

    def end(self) -> None:
        self._end = self._mark()

    @property
    def ms(self) -> float:
        """Milliseconds. On CUDA, to be read after the device was waited for."""
        elapsed: float = self._begin.elapsed_time(self._end)
        return elapsed

    def _mark(self) -> Any:
        """An event; on a CPU something that answers as one."""
        if self._device.type != "cuda":
            return _HostTime()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class _HostTime:
    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, later: _HostTime) -> float:
        return 1e3 * (later._seconds - self._seconds)


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the nearest ranks; `percent` in 0..100. NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(values: Sequence[float]) -> float:
    """The 50th percentile. NaN for no values."""
    return percentile(values, 50)
