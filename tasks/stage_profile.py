"""What one stage did with its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from accel.measure.activity import Activity
from tasks.kernel_categories import Category, category_of

# What a fused kernel could take over, and what better preparation could avoid.
FUSIBLE: tuple[Category, ...] = ("elementwise", "norm", "reduction")
AVOIDABLE: tuple[Category, ...] = ("copy",)

_GAPS = 10  # in the file


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """All runs of one kernel or operator in a stage. share: of the stage's summed work, 0..1."""

    name: str
    category: Category
    calls: int
    ms: float
    share: float

    @property
    def could_be(self) -> str:
        """ "fused", "avoided" (hoisted out of the request or the loop), or empty."""
        if self.category in FUSIBLE:
            return "fused"
        return "avoided" if self.category in AVOIDABLE else ""


@dataclass(frozen=True, kw_only=True)
class FusedTraffic:
    """What the fused kernels of a stage moved, against what a copy moves in that time.

    moved: bytes that must be read and written, by site. copy_bandwidth: bytes per second.
    """

    moved: dict[str, int]
    ms: float
    copy_bandwidth: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second; 0 where no time was measured."""
        return sum(self.moved.values()) / (self.ms * 1e-3) if self.ms else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"bandwidth": self.bandwidth, "roofline": self.bandwidth / self.copy_bandwidth}


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """One stage of one profiled request.

    p50_ms: of requests without a profiler. on_gpu: kernels; else operators of the CPU. ours: names of fused
    kernels. traffic: of the fused kernels, where they ran on a GPU.
    """

    name: str
    p50_ms: float
    activity: Activity
    on_gpu: bool
    ours: Collection[str] = ()
    traffic: FusedTraffic | None = None

    @property
    def rows(self) -> list[KernelRow]:
        """Longest first."""
        total = sum(work.ms for work in self.activity.work)
        return [
            KernelRow(
                name=work.name,
                category=category_of(work.name, ours=self.ours),
                calls=work.calls,
                ms=work.ms,
                share=work.ms / total if total else 0.0,
            )
            for work in self.activity.work
        ]

    @property
    def by_category(self) -> dict[Category, float]:
        """Milliseconds by category, most first."""
        sums: defaultdict[Category, float] = defaultdict(float)
        for row in self.rows:
            sums[row.category] += row.ms
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def idle_ms(self) -> float | None:
        """Time of the stage in which the GPU ran nothing; `None` on a CPU."""
        return max(0.0, self.p50_ms - self.activity.busy_ms) if self.on_gpu else None

    @property
    def unfused(self) -> list[KernelRow]:
        """What could still be fused or avoided, longest first."""
        return [row for row in self.rows if row.could_be]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Gaps are those of the profiled request, in which the host is slower."""
        return {
            "name": self.name,
            "p50_ms": self.p50_ms,
            "busy_ms": self.activity.busy_ms,
            "idle_ms": self.idle_ms,
            "categories_ms": self.by_category,
            "kernels": [asdict(row) | {"could_be": row.could_be} for row in self.rows],
            "gaps": [asdict(gap) for gap in self.activity.gaps[:_GAPS]],
            "traffic": self.traffic and self.traffic.to_dict(),
        }
