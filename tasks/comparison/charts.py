"""Geometry of the charts of the page, in units of their SVG view boxes; the template draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.comparison.figures import Figures
from tasks.comparison.rows import JobRow
from tasks.number_text import mebibytes, milliseconds, times

WIDTH = 720

_COLOURS = 8  # of the style sheet: c0 to c7
_LADDER = ("eager", "graph", "fused", "graph+fused", "segmented", "compile", "auto")
_LABEL, _VALUE, _BAR = 210, 130, 26  # columns of text left and right of the bars, height of a bar
_PLOT = (70, 20, 620, 230)  # left, top, width, height of the scatter's plane


@dataclass(frozen=True)
class Timed:
    """A job with steady requests, and their median."""

    row: JobRow
    request: Figures
    p50_ms: float

    @property
    def mib(self) -> float:
        return self.request.extra_bytes / 2**20

    @property
    def label(self) -> str:
        policy = (self.row.accel, *(text for text in self.row.others if text.startswith("accel.")))
        return f"job {self.row.job} {' '.join(policy)}"


@dataclass(frozen=True, kw_only=True)
class Segment:
    x: float
    width: float
    colour: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    label: str
    value: str
    y: float
    end: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """legend: colours and what they mean; none where the labels say it."""

    title: str
    height: float
    bars: tuple[Bar, ...]
    legend: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float
    colour: int
    label: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ScatterChart:
    """x_ticks, y_ticks: place and text."""

    title: str
    left: float
    bottom: float
    right: float
    top: float
    points: tuple[Point, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[int, str], ...]


def ladders(rows: Sequence[JobRow]) -> list[BarChart]:
    """For each model and other overrides: eager -> graph -> fused -> graph+fused, and what else there is."""
    return [_ladder(work, group) for work, group in _groups(rows, _work).items()]


def stage_stacks(rows: Sequence[JobRow]) -> list[BarChart]:
    """For each model: where the time of each job goes, stage by stage."""
    return [_stage_stack(model, group) for model, group in _groups(rows, _model).items()]


def memory_scatters(rows: Sequence[JobRow]) -> list[ScatterChart]:
    """For each model: extra device memory to the right, latency upwards; best is the lower left corner."""
    return [_memory_scatter(model, group) for model, group in _groups(rows, _model).items()]


def _ladder(title: str, rows: Sequence[Timed]) -> BarChart:
    return _bar_chart(
        title,
        sorted(rows, key=lambda timed: _rung(timed.row.accel)),
        lambda timed: timed.row.figures[:1],
        value=lambda timed: f"{milliseconds(timed.p50_ms)} ms, {times(timed.request.speed_up)}",
        colour=lambda timed, _: _rung(timed.row.accel),
    )


def _stage_stack(title: str, rows: Sequence[Timed]) -> BarChart:
    stages = dict.fromkeys(part.stage for timed in rows for part in timed.row.figures[1:])
    colours = {stage: number % _COLOURS for number, stage in enumerate(stages)}
    return _bar_chart(
        title,
        rows,
        lambda timed: timed.row.figures[1:],
        value=lambda timed: f"{milliseconds(timed.p50_ms)} ms",
        colour=lambda _, part: colours[part.stage],
        legend=tuple((colour, stage) for stage, colour in colours.items()),
    )


def _memory_scatter(title: str, rows: Sequence[Timed]) -> ScatterChart:
    left, top, width, height = _PLOT
    most_ms = _round_up(max(timed.p50_ms for timed in rows))
    most_mib = _round_up(max(timed.mib for timed in rows))
    return ScatterChart(
        title=title,
        left=left,
        bottom=top + height,
        right=left + width,
        top=top,
        points=tuple(
            Point(
                x=round(left + width * timed.mib / most_mib, 1),
                y=round(top + height * (1 - timed.p50_ms / most_ms), 1),
                colour=_rung(timed.row.accel),
                label=str(timed.row.job),
                text=f"{timed.label}: {milliseconds(timed.p50_ms)} ms, "
                f"{mebibytes(timed.request.extra_bytes)} MiB",
            )
            for timed in rows
        ),
        x_ticks=tuple((left + width * n / 4, f"{most_mib * n / 4:g}") for n in range(5)),
        y_ticks=tuple((top + height * (1 - n / 4), f"{most_ms * n / 4:g}") for n in range(5)),
        legend=tuple((_rung(accel), accel) for accel in dict.fromkeys(timed.row.accel for timed in rows)),
    )


def _bar_chart(
    title: str,
    rows: Sequence[Timed],
    parts: Callable[[Timed], Sequence[Figures]],
    *,
    value: Callable[[Timed], str],
    colour: Callable[[Timed, Figures], int],
    legend: tuple[tuple[int, str], ...] = (),
) -> BarChart:
    """One bar a job, of one segment for each of its parts; all to one scale, that of the longest."""
    longest = max(sum(part.p50_ms or 0 for part in parts(timed)) for timed in rows)
    scale = (WIDTH - _LABEL - _VALUE) / longest if longest else 0.0
    bars = []
    for number, timed in enumerate(rows):
        x, segments = float(_LABEL), []
        for part in parts(timed):
            width = scale * (part.p50_ms or 0)
            text = f"{part.stage}: {milliseconds(part.p50_ms)} ms"
            segments.append(
                Segment(x=round(x, 1), width=round(width, 1), colour=colour(timed, part), text=text)
            )
            x += width
        bars.append(
            Bar(
                label=timed.label,
                value=value(timed),
                y=_BAR * number,
                end=round(x, 1),
                segments=tuple(segments),
            )
        )
    return BarChart(title=title, height=_BAR * len(rows), bars=tuple(bars), legend=legend)


def _groups(rows: Sequence[JobRow], key: Callable[[JobRow], str]) -> dict[str, list[Timed]]:
    """Of the jobs that were timed."""
    groups: dict[str, list[Timed]] = {}
    for row in rows:
        if row.request is not None and row.request.p50_ms:
            groups.setdefault(key(row), []).append(Timed(row, row.request, row.request.p50_ms))
    return groups


def _model(row: JobRow) -> str:
    return row.model


def _work(row: JobRow) -> str:
    """What a job did, without how it was made faster."""
    return " ".join((row.model, *(text for text in row.others if not text.startswith("accel."))))


def _rung(accel: str) -> int:
    """Where a policy stands in the charts, and its colour; all that is unknown comes last."""
    return _LADDER.index(accel) if accel in _LADDER else len(_LADDER)


def _round_up(value: float) -> float:
    """To the next 1, 2, 4 or 8 times a power of ten, whose quarters read well; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return float(next((n * power for n in (1, 2, 4, 8) if n * power >= value), 10 * power))
