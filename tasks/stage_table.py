"""The stage table of a run as text: one row a stage, a total, and what was not accelerated and why."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from accel.measure.timing import median, percentile
from accel.record import Kind, Outcome, Reason, RunRecord, SiteOutcome, StageRecord
from tasks.number_text import NONE, count, mebibytes, milliseconds, percent

N = TypeVar("N", int, float)

MAX_BREAKS = 12  # lines
CELL_WIDTH = 28  # holds "eager (component_offloaded)"


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """Cells as shown. Times in ms; `busy` in percent of the median wall time.

    launches: kernels, copies and fills that ran on the GPU. host: calls by which the host started them.
    """

    stage: str
    p50: str
    p95: str
    cold: str
    launches: str = NONE
    host: str = NONE
    busy: str = NONE
    extra_mib: str = NONE
    tier: str = ""
    graphs: str = ""
    fused: str = ""


@dataclass
class Refusal:
    """One outcome that was not the planned one, gathered over stages and sites."""

    outcome: str
    detail: str
    calls: int = 0
    stages: dict[str, None] = field(default_factory=dict)
    sites: dict[str, None] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """For example "reference (mismatch) x3: swiglu in denoising"."""
        where = f"{', '.join(self.sites)} in " if self.sites else ""
        return f"{self.outcome} x{self.calls}: {where}{', '.join(self.stages)}"


def stage_rows(record: RunRecord) -> list[StageRow]:
    """Rows in pipeline order."""
    return [
        _row(stage, tier=stage.tier, graphs=graphs_cell(stage), fused=fused_cell(stage))
        for stage in record.stages.values()
    ]


def total_row(record: RunRecord, request: StageRecord) -> StageRow:
    """Wall times of whole requests; launches, GPU-busy and memory summed over stages."""
    stages = record.stages.values()
    total = StageRecord(
        "total",
        cold_ms=request.cold_ms,
        walls_ms=request.walls_ms,
        launches=_sum(stage.launches for stage in stages),
        host_launches=_sum(stage.host_launches for stage in stages),
        gpu_busy_ms=_sum(stage.gpu_busy_ms for stage in stages),
        extra_bytes=sum(s.extra_bytes for s in stages),
    )
    return _row(total)


def refusals(record: RunRecord) -> list[Refusal]:
    """What ran eager or by its reference although nobody switched it off, most calls first."""
    found: dict[tuple[str, str], Refusal] = {}
    for stage in record.stages.values():
        happened: list[tuple[Outcome | SiteOutcome, int]] = [*stage.outcomes.items(), *stage.sites.items()]
        for outcome, calls in happened:
            if outcome.reason in (None, Reason.DISABLED):
                continue
            refusal = found.setdefault((str(outcome), outcome.detail), Refusal(str(outcome), outcome.detail))
            refusal.calls += calls
            refusal.stages[stage.name] = None
            if isinstance(outcome, SiteOutcome):
                refusal.sites[outcome.site] = None
        for mount in stage.mounts:
            if not mount.mounted:
                refusal = found.setdefault((str(mount), mount.detail), Refusal(str(mount), mount.detail))
                refusal.calls += mount.blocks
                refusal.stages[stage.name] = None
                refusal.sites[mount.block] = None
    return sorted(found.values(), key=lambda refusal: -refusal.calls)


def break_lines(record: RunRecord) -> list[str]:
    """Where segmented graphs leave the device, e.g. "denoising: model.py:12 aten::item (automatic) x4"."""
    lines = []
    for stage in record.stages.values():
        for place, passes in Counter(stage.breaks).items():
            lines.append(f"{stage.name}: {place}" + (f" x{passes}" if passes > 1 else ""))
    if len(lines) > MAX_BREAKS:
        lines[MAX_BREAKS:] = [f"and {len(lines) - MAX_BREAKS} more places; all are in result.json"]
    return lines


def graph_lines(record: RunRecord) -> list[str]:
    """Graphs that live and graphs that made room for others, by stage; nothing where there are none."""
    stages = record.stages.values()
    counted = {
        "kept": {stage.name: stage.entries for stage in stages},
        "evicted": {stage.name: stage.evictions for stage in stages},
    }
    return [
        f"{what}: " + ", ".join(f"{stage} {n}" for stage, n in counts.items() if n)
        for what, counts in counted.items()
        if any(counts.values())
    ]


def graphs_cell(stage: StageRecord) -> str:
    """For example "20 replayed, 4 captured"; the count is left out where all calls ran eager alike."""
    counts: Counter[str] = Counter()
    for outcome, calls in stage.outcomes.items():
        counts[str(outcome)] += calls
    if not counts:
        return NONE
    if len(counts) == 1 and not counts.keys() & {Kind.REPLAYED, Kind.CAPTURED}:
        return next(iter(counts))
    return _wrap(f"{calls} {outcome}" for outcome, calls in counts.most_common())


def fused_cell(stage: StageRecord) -> str:
    """Sites that ran fused, then the reasons of those that did not."""
    fused = dict.fromkeys(site.site for site in stage.sites if site.fused)
    references = dict.fromkeys(str(site) for site in stage.sites if not site.fused)
    return _wrap((*fused, *references)) or NONE


def _row(stage: StageRecord, *, tier: str = "", graphs: str = "", fused: str = "") -> StageRow:
    p50 = median(stage.walls_ms) if stage.walls_ms else None
    p95 = percentile(stage.walls_ms, 95) if stage.walls_ms else None
    busy = stage.gpu_busy_ms / p50 if stage.gpu_busy_ms is not None and p50 else None
    return StageRow(
        stage=stage.name,
        p50=milliseconds(p50),
        p95=milliseconds(p95),
        cold=milliseconds(stage.cold_ms),
        launches=count(stage.launches),
        host=count(stage.host_launches),
        busy=percent(busy),
        extra_mib=mebibytes(stage.extra_bytes),
        tier=tier,
        graphs=graphs,
        fused=fused,
    )


def _sum(values: Iterable[N | None]) -> N | None:
    """The sum of what was measured; `None` where nothing was."""
    measured = [value for value in values if value is not None]
    return sum(measured[1:], start=measured[0]) if measured else None


def _wrap(parts: Iterable[str]) -> str:
    """Join with commas on lines of CELL_WIDTH, never breaking within a part."""
    glued = ", ".join(part.replace(" ", "\0") for part in parts)
    lines = textwrap.wrap(glued, CELL_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")
