"""The comparison as tables of text, which the terminal and Markdown lay out each in its own way."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tasks.comparison.figures import Figures
from tasks.comparison.findings import REQUEST
from tasks.comparison.rows import JobRow
from tasks.number_text import NONE, count, mebibytes, milliseconds, percent, scientific, times


@dataclass(frozen=True)
class Column:
    title: str
    is_number: bool = False


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """rows: cells as shown, one to a column. keys: how many columns say what a row is about."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: int

    def with_columns(self, indices: Sequence[int]) -> TextTable:
        return replace(
            self,
            columns=tuple(self.columns[n] for n in indices),
            rows=tuple(tuple(row[n] for n in indices) for row in self.rows),
        )


JOB_COLUMNS = tuple(map(Column, ("job", "status", "model", "accel", "other overrides", "note")))
STAGE_COLUMNS = (
    *map(Column, ("stage", "job", "accel")),
    *(Column(title, is_number=True) for title in ("p50 ms", "p95 ms", "speed-up", "cold ms")),
    *(Column(title, is_number=True) for title in ("GPU busy", "launches", "host", "extra MiB")),
    *map(Column, ("tier", "bits", "fallbacks")),
)


def job_table(rows: Sequence[JobRow]) -> TextTable:
    """What each job was and what became of it."""
    return TextTable(title="Jobs", columns=JOB_COLUMNS, rows=tuple(map(_job_cells, rows)), keys=1)


def stage_tables(rows: Sequence[JobRow]) -> list[TextTable]:
    """One table a model: every stage, and under it every job that ran it."""
    return [
        TextTable(
            title=model,
            columns=STAGE_COLUMNS,
            rows=tuple(
                _stage_cells(row, figures)
                for stage in _stages(rows, model)
                for row in rows
                for figures in row.figures
                if row.model == model and figures.stage == stage
            ),
            keys=3,
        )
        for model in dict.fromkeys(row.model for row in rows if row.figures)
    ]


def fallback_lines(rows: Sequence[JobRow]) -> list[str]:
    """Why something ran eager or by its reference, most calls first, over all jobs and stages.

    For example "eager (no_cuda) x56: text_encoding, vae in jobs 1, 3".
    """
    calls = Counter[tuple[str, str]]()
    stages, jobs = (
        defaultdict[tuple[str, str], list[str]](list),
        defaultdict[tuple[str, str], list[int]](list),
    )
    for row in rows:
        for figures in row.figures[1:]:
            for fallback in figures.fallbacks:
                key = fallback.text, fallback.detail
                calls[key] += fallback.calls
                stages[key].append(figures.stage)
                jobs[key].append(row.job)
    return [
        f"{key[0]} x{n}: {', '.join(dict.fromkeys(stages[key]))} in {_jobs(list(dict.fromkeys(jobs[key])))}"
        + (f"; {key[1]}" if key[1] else "")
        for key, n in calls.most_common()
    ]


def problem(row: JobRow) -> str:
    """What is wrong with this job, or with its numbers; empty if nothing is."""
    problems = [row.error] if row.error else []
    if row.broken_promises:
        problems.append(f"OTHER BITS than {row.compared_with} in {', '.join(row.unequal_outputs)}")
    if row.contended_with:
        problems.append(f"contended: ran beside {_jobs(row.contended_with)}")
    return "; ".join(problems)


def note(row: JobRow) -> str:
    """What a reader must know of this job before believing its numbers."""
    chosen = ", ".join(f"{stage} {found['choice']}" for stage, found in row.choices.items())
    notes = (problem(row), *row.remarks, f"chosen: {chosen}" if chosen else "")
    return "; ".join(text for text in notes if text)


def bits(figures: Figures) -> str:
    """For example "equal", or "OTHER (1.2e-03)" with the relative error."""
    verdict = {None: NONE, True: "equal", False: "OTHER"}[figures.equal]
    return f"{verdict} ({scientific(figures.relative_error)})" if figures.relative_error else verdict


def fallback_calls(figures: Figures) -> str:
    """For example "eager (no_cuda) x40"; the reasons of all sites together, details left out."""
    calls: dict[str, int] = {}
    for fallback in figures.fallbacks:
        kind = f"{fallback.kind} ({fallback.reason})"
        calls[kind] = calls.get(kind, 0) + fallback.calls
    return ", ".join(f"{kind} x{n}" for kind, n in calls.items()) or NONE


def _job_cells(row: JobRow) -> tuple[str, ...]:
    return (
        str(row.job),
        row.status,
        row.model or NONE,
        row.accel or NONE,
        " ".join(row.others) or NONE,
        note(row) or NONE,
    )


def _stage_cells(row: JobRow, figures: Figures) -> tuple[str, ...]:
    return (
        figures.stage,
        str(row.job),
        row.accel,
        milliseconds(figures.p50_ms),
        milliseconds(figures.p95_ms),
        times(figures.speed_up),
        milliseconds(figures.cold_ms),
        percent(figures.gpu_busy),
        count(figures.launches),
        count(figures.host_launches),
        mebibytes(figures.extra_bytes),
        figures.tier,
        bits(figures),
        fallback_calls(figures),
    )


def _stages(rows: Iterable[JobRow], model: str) -> list[str]:
    """In the order of the pipeline, whole requests last: what is read first stands nearest to the prompt."""
    names = dict.fromkeys(f.stage for row in rows if row.model == model for f in row.figures[1:])
    return [*names, REQUEST]


def _jobs(numbers: Sequence[int]) -> str:
    return ("job " if len(numbers) == 1 else "jobs ") + ", ".join(map(str, numbers))
