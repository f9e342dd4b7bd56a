"""Wall times with the device synchronised at both ends, and what to say about many of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Wall:
    """ms: elapsed wall time, milliseconds; set when the block ends without an exception."""

    ms: float = math.nan


@contextmanager
def wall_timer(device: torch.device) -> Iterator[Wall]:
    """Time a block. Work pending before it does not count, work it enqueued does."""
    wall = Wall()
    synchronize(device)
    started = time.perf_counter()
    yield wall
    synchronize(device)
    wall.ms = 1e3 * (time.perf_counter() - started)


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
