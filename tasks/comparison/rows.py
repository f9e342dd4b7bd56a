"""The comparison as data: one row a job, with the figures of its whole requests and of each stage."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.comparison.figures import Figures, figures_of
from tasks.comparison.findings import REQUEST, Findings
from tasks.comparison.outcomes import JobStatus, Outcome, contending, outcome_of
from tasks.sweep import Job

EAGER = "eager"


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """What became of a job.

    task, model, accel: names of the choices, "" where the job never started to say.
    others: its other overrides, but for those that all jobs have.
    folder, traces: relative to the folder of the sweep.
    begin, end: seconds since 1970, UTC.
    contended_with: jobs that ran at the same time on the same device; its times are not to be trusted then.
    eager_job: the number of the eager job with all other settings the same, which it is compared with.
    compared_with: that job, or the policy that the job itself ran beside; "" for neither.
    unequal_outputs: "stage.field" names with other bits than there.
    choices: what `accel=auto` chose, by stage: {"choice": ..., "reason": ...}. remarks: of its task.
    figures: of whole requests first, then of each stage; none for a job without a result.
    """

    job: int
    status: JobStatus
    error: str
    task: str
    model: str
    accel: str
    others: tuple[str, ...]
    overrides: tuple[str, ...]
    folder: str
    traces: tuple[str, ...]
    device: str
    begin: float | None
    end: float | None
    contended_with: tuple[int, ...] = ()
    eager_job: int | None = None
    compared_with: str = ""
    unequal_outputs: tuple[str, ...] = ()
    choices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    figures: tuple[Figures, ...] = ()

    @property
    def request(self) -> Figures | None:
        """The figures of its whole requests."""
        return self.figures[0] if self.figures else None

    @property
    def broken_promises(self) -> tuple[str, ...]:
        """`REQUEST` and the stages that promise equal bits and have others.

        Not those after one that may have others: they get other inputs.
        """
        if self.request is None or self.request.equal is not False:
            return ()
        unequal = [figures for figures in self.figures[1:] if figures.equal is False]
        broken = [f.stage for f in itertools.takewhile(lambda figures: figures.tier == "exact", unequal)]
        return (REQUEST, *broken) if broken or not unequal else ()


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
        if outcome.found is not None:
            row = _with_figures(row, outcome.found, eager.get(_settings_but_accel(outcome.found)))
        rows.append(row)
    return rows


def _row(outcome: Outcome, sweep: Path, common: set[str]) -> JobRow:
    job, record = outcome.job, outcome.record
    chosen = {key: value for key, _, value in (text.partition("=") for text in job.overrides)}
    return JobRow(
        job=job.number,
        status=outcome.status,
        error=outcome.error,
        task=record.task if record else chosen.get("task", ""),
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
        device=outcome.found.device if outcome.found else "",
        begin=record.begin if record else None,
        end=record.end if record else None,
    )


def _with_figures(row: JobRow, found: Findings, eager: Outcome | None) -> JobRow:
    row = replace(row, choices=found.choices, remarks=found.remarks)
    if found.reference is not None:
        return replace(
            row,
            compared_with=found.reference.policy,
            unequal_outputs=found.reference.unequal,
            figures=figures_of(found, None),
        )
    if eager is None or eager.found is None:
        return replace(row, figures=figures_of(found, None))
    names = found.digests.items() ^ eager.found.digests.items()
    return replace(
        row,
        eager_job=eager.job.number,
        compared_with=f"job {eager.job.number}",
        unequal_outputs=tuple(sorted({name for name, _ in names})),
        figures=figures_of(found, eager.found),
    )


def _eager_jobs(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """The first finished eager job of each group of jobs that differ in `accel` alone."""
    eager: dict[str, Outcome] = {}
    for outcome in outcomes:
        found = outcome.found
        if found is not None and outcome.status == "ok" and _is_eager(found.config["accel"]):
            eager.setdefault(_settings_but_accel(found), outcome)
    return eager


def _is_eager(accel: Mapping[str, Any]) -> bool:
    """By what it says, too: settings beside accel=eager may switch things on."""
    policies = (accel, *accel["stages"].values())
    return accel["name"] == EAGER and not any(
        policy["enable_cuda_graph"] or policy["compile"] or any(policy["fused"].values())
        for policy in policies
    )


def _settings_but_accel(found: Findings) -> str:
    """Equal for jobs whose times and bits may be compared: the same work on the same kind of device."""
    settings: dict[str, Any] = {
        key: value for key, value in found.config.items() if key not in ("accel", "output", "logger")
    }
    return json.dumps([settings, found.device], sort_keys=True)
