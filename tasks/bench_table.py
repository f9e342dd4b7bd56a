"""The tables of `task=bench`: latencies of both arms by stage, and what acceleration did for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from accel.record import StageRecord
from tasks.gpu_state import GpuState
from tasks.latency import Histogram, Latency, speed_up
from tasks.markdown_table import markdown_table
from tasks.number_text import NONE, count, mebibytes, milliseconds, percent, scientific, times

TOTAL = "total"
LATENCIES = ("stage", "arm", "p50", "p90", "p99", "max", "speed-up")
FACTS = ("stage", "arm", "cold", "launches", "host", "GPU busy", "extra MiB", "hits", "tier", "bits")
_BAR = 40  # characters


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one stage in one arm, or of whole requests (`TOTAL`), ms.

    walls_ms: of stages on the device's clock, of whole requests on the host's.
    record: what happened in the stage; `None` for whole requests.
    """

    name: str
    cold_ms: float | None
    walls_ms: Sequence[float]
    record: StageRecord | None = None

    @property
    def latency(self) -> Latency | None:
        return Latency.of(self.walls_ms)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        times = {
            "name": self.name,
            "cold_ms": self.cold_ms,
            "walls_ms": list(self.walls_ms),
            "latency_ms": self.latency and asdict(self.latency),
        }
        return (self.record.to_dict() if self.record else {}) | times


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """arms: timings by arm, the reference first; stages in order, then `TOTAL`.
    unequal: outputs, by "stage.field", whose bits differ between or within the arms; `None` where the
    accelerated arm has none to compare. errors: of these, as `relative_error` has them, where both arms came
    to their end. states: of the GPU, by when.
    """

    arms: Mapping[str, Sequence[Timing]]
    unequal: Collection[str] | None
    states: Mapping[str, GpuState]
    errors: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def histogram(self) -> Histogram:
        """Of whole requests."""
        return Histogram.of({arm: timings[-1].walls_ms for arm, timings in self.arms.items()})

    @property
    def speed_ups(self) -> dict[str, float | None]:
        """Ratio of medians, reference over accelerated, by stage."""
        reference, accelerated = self.arms.values()
        fast = {timing.name: timing.latency for timing in accelerated}
        return {timing.name: speed_up(timing.latency, fast.get(timing.name)) for timing in reference}

    def latency_rows(self) -> list[list[str]]:
        """Cells of `LATENCIES`: for every stage one row an arm."""
        return [
            [timing.name, arm, *_latency(timing.latency), self._gain(arm, timing.name)]
            for arm, timing in self._by_stage()
        ]

    def fact_rows(self) -> list[list[str]]:
        """Cells of `FACTS`."""
        return [
            [timing.name, arm, milliseconds(timing.cold_ms), *self._facts(timing)]
            for arm, timing in self._by_stage()
        ]

    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        calls = ", ".join(f"{arm} {len(timings[-1].walls_ms)}" for arm, timings in self.arms.items())
        lines = [
            "Times in ms: stages on the device's clock, totals on the host's; arms took turns (A B B A).",
            f"Calls: {calls}. Speed-up: ratio of medians.",
        ]
        for when, state in self.states.items():
            if state.throttled:
                lines.append(f"The GPU was slowed down {when} the calls: {', '.join(state.clock_limits)}.")
        if self.unequal:
            found = (f"{name} (relative error {scientific(self.errors.get(name))})" for name in self.unequal)
            lines.append(f"UNEQUAL bits: {', '.join(found)}.")
        return lines

    def _by_stage(self) -> list[tuple[str, Timing]]:
        names = dict.fromkeys(timing.name for timings in self.arms.values() for timing in timings)
        return [
            (arm, timing)
            for name in names
            for arm, timings in self.arms.items()
            for timing in timings
            if timing.name == name
        ]

    def _gain(self, arm: str, stage: str) -> str:
        gain = self.speed_ups.get(stage) if arm != next(iter(self.arms)) else None
        return times(gain)

    def _facts(self, timing: Timing) -> list[str]:
        record, latency = timing.record, timing.latency
        if record is None:
            return [*[NONE] * 6, self._bits("")]
        p50, busy_ms = latency and latency.p50, record.gpu_busy_ms
        return [
            count(record.launches),
            count(record.host_launches),
            percent(busy_ms / p50 if busy_ms is not None and p50 else None),
            mebibytes(record.extra_bytes),
            percent(record.hit_ratio),
            record.tier,
            self._bits(f"{timing.name}."),
        ]

    def _bits(self, prefix: str) -> str:
        """Of the outputs whose names start like this."""
        if self.unequal is None:
            return NONE
        return "UNEQUAL" if any(name.startswith(prefix) for name in self.unequal) else "equal"


def bench_markdown(report: BenchReport, *, title: str) -> str:
    """The whole report as a Markdown page."""
    histogram = report.histogram
    return "\n".join(
        [
            f"# {title}",
            "",
            *markdown_table(LATENCIES, report.latency_rows(), text_columns=2),
            "",
            *markdown_table(FACTS, report.fact_rows(), text_columns=2),
            "",
            "Whole requests:",
            "",
            *markdown_table(("ms", *histogram.counts), _histogram_rows(histogram)),
            "",
            *(f"- {note}" for note in report.notes()),
            "",
        ]
    )


def _histogram_rows(histogram: Histogram) -> list[list[str]]:
    """One row a bin that holds a call: its range, and a bar and a count for each arm."""
    most = max((count for counts in histogram.counts.values() for count in counts), default=0)
    ranges = zip(histogram.edges_ms, histogram.edges_ms[1:], strict=False)
    rows = zip(ranges, *histogram.counts.values(), strict=True)
    return [
        [f"{milliseconds(low)} to {milliseconds(high)}", *(_bar(count, most) for count in counts)]
        for (low, high), *counts in rows
        if any(counts)
    ]


def _bar(count: int, most: int) -> str:
    return f"{'█' * round(_BAR * count / most)} {count}"


def _latency(latency: Latency | None) -> list[str]:
    values = (latency.p50, latency.p90, latency.p99, latency.max) if latency else (None,) * 4
    return [milliseconds(value) for value in values]
