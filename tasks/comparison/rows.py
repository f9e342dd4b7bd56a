"""The comparison as data: one row a job, with the figures of its whole requests and of each stage."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.comparison.figures import Figures, figures_of
from tasks.comparison.outcomes import JobStatus, Outcome, contending, outcome_of
from tasks.result_file import RunResult
from tasks.sweep import Job

EAGER = "eager"


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """What became of a job.

    model, accel: names of the choices, "" where the job started too late to say.
    others: its other overrides, but for those that all jobs have.
    folder, traces: relative to the folder of the sweep.
    begin, end: seconds since 1970, UTC.
    contended_with: jobs that ran at the same time on the same device; its times are not to be trusted then.
    eager_job: the number of the eager job with all other settings the same, which it is compared with.
    unequal_outputs: "stage.field" names with other bits than in the eager job.
    figures: of whole requests first, then of each stage; none for a job without a result.
    """

    job: int
    status: JobStatus
    error: str
    model: str
    accel: str
    others: tuple[str, ...]
    overrides: tuple[str, ...]
    folder: str
    traces: tuple[str, ...]
    device: str
    begin: float | None
    end: float | None
    contended_with: tuple[int, ...]
    eager_job: int | None
    unequal_outputs: tuple[str, ...]
    figures: tuple[Figures, ...]

    @property
    def request(self) -> Figures | None:
        """The figures of its whole requests."""
        return self.figures[0] if self.figures else None

    @property
    def broken_promises(self) -> tuple[str, ...]:
        """Stages that promise the bits of eager and have others."""
        return tuple(f.stage for f in self.figures if f.tier == "exact" and f.equal is False)


def rows_of(jobs: Sequence[Job], sweep: Path) -> list[JobRow]:
    """Read what the jobs wrote. sweep: the folder of the sweep."""
    outcomes = [outcome_of(job) for job in jobs]
    records = [outcome.record for outcome in outcomes if outcome.record is not None]
    eager = _eager_jobs(outcomes)
    common = set.intersection(*(set(job.overrides) for job in jobs)) if jobs else set()
    rows = []
    for outcome in outcomes:
        row = _row(outcome, sweep, common)
        if outcome.record is not None:
            row = replace(row, contended_with=contending(outcome.record, records))
        if outcome.result is not None:
            row = _with_figures(row, outcome.result, eager.get(_settings_but_accel(outcome.result)))
        rows.append(row)
    return rows


def _row(outcome: Outcome, sweep: Path, common: set[str]) -> JobRow:
    job, record = outcome.job, outcome.record
    chosen = {key: value for key, _, value in (text.partition("=") for text in job.overrides)}
    return JobRow(
        job=job.number,
        status=outcome.status,
        error=outcome.error,
        model=record.model if record else chosen.get("model", ""),
        accel=record.accel if record else chosen.get("accel", ""),
        others=tuple(
            text
            for text in job.overrides
            if text not in common and text.partition("=")[0] not in ("model", "accel")
        ),
        overrides=job.overrides,
        folder=os.path.relpath(job.folder, sweep),
        traces=tuple(os.path.relpath(path, sweep) for path in sorted(job.folder.glob("*trace*.json*"))),
        device=outcome.result.environment["device"]["name"] if outcome.result else "",
        begin=record.begin if record else None,
        end=record.end if record else None,
        contended_with=(),
        eager_job=None,
        unequal_outputs=(),
        figures=(),
    )


def _with_figures(row: JobRow, result: RunResult, eager: Outcome | None) -> JobRow:
    base = eager.result if eager else None
    names = result.digests.items() ^ base.digests.items() if base else ()
    return replace(
        row,
        eager_job=eager.job.number if eager else None,
        unequal_outputs=tuple(sorted({name for name, _ in names})),
        figures=figures_of(result, base),
    )


def _eager_jobs(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """The first finished eager job of each group of jobs that differ in `accel` alone."""
    eager: dict[str, Outcome] = {}
    for outcome in outcomes:
        result = outcome.result
        if result is not None and outcome.status == "ok" and result.config["accel"]["name"] == EAGER:
            eager.setdefault(_settings_but_accel(result), outcome)
    return eager


def _settings_but_accel(result: RunResult) -> str:
    """Equal for jobs whose times and bits may be compared: the same work on the same kind of device."""
    settings: dict[str, Any] = {
        key: value for key, value in result.config.items() if key not in ("accel", "output", "logger")
    }
    return json.dumps([settings, result.environment["device"]["name"]], sort_keys=True)
