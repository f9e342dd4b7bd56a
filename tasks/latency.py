"""Many latencies in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from accel.measure.timing import percentile

BINS = 20


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Percentiles of the times of like calls, ms."""

    calls: int
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, walls_ms: Sequence[float]) -> Latency | None:
        """`None` for no calls."""
        if not walls_ms:
            return None
        p50, p90, p99 = (percentile(walls_ms, percent) for percent in (50, 90, 99))
        return cls(calls=len(walls_ms), p50=p50, p90=p90, p99=p99, max=max(walls_ms))


@dataclass(frozen=True)
class Histogram:
    """edges_ms: borders of the bins, one more than there are bins. counts: calls in each bin, by arm."""

    edges_ms: list[float]
    counts: dict[str, list[int]]

    @classmethod
    def of(cls, walls_ms: Mapping[str, Sequence[float]], *, bins: int = BINS) -> Histogram:
        """All arms over the same bins."""
        edges = np.histogram_bin_edges([wall for walls in walls_ms.values() for wall in walls], bins)
        counts = {arm: np.histogram(walls, edges)[0].tolist() for arm, walls in walls_ms.items()}
        return cls(edges.tolist(), counts)


def speed_up(reference: Latency | None, faster: Latency | None) -> float | None:
    """Ratio of medians; `None` where one is missing."""
    return reference.p50 / faster.p50 if reference and faster and faster.p50 > 0 else None
