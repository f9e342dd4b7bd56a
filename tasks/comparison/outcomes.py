"""What became of each job of a sweep, read from the files in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.comparison.findings import Findings
from tasks.comparison.reports import read_findings
from tasks.job_record import CPU, JOB_FILE, JobRecord, read_record
from tasks.sweep import ERROR_FILE, REPORT_FILES, Job, read_report

JobStatus = Literal["ok", "interrupted", "failed", "no result", "not started"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """status: `failed` jobs have an error; `no result` ones ended without a file, or were cut short.
    found: `None` where the job wrote nothing to compare.
    """

    job: Job
    status: JobStatus
    error: str
    record: JobRecord | None
    found: Findings | None


def recorded_jobs(folder: Path) -> list[Job]:
    """The jobs that a sweep really started, by number: for a sweeper that chooses them as it goes."""
    found = [(read_record(file.parent), file.parent) for file in folder.rglob(JOB_FILE)]
    jobs = [Job(record.overrides, place, record.number) for record, place in found if record is not None]
    return sorted(jobs, key=lambda job: job.number)


def outcome_of(job: Job) -> Outcome:
    """What the files in the job's folder say."""
    record = read_record(job.folder)
    task = record.task if record else "run"
    status, error = _status(job.folder, task)
    found = read_findings(job.folder, task)
    return Outcome(job=job, status=status, error=error, record=record, found=found)


def _status(folder: Path, task: str) -> tuple[JobStatus, str]:
    error_file = folder / ERROR_FILE
    if error_file.exists():
        return "failed", error_file.read_text(encoding="utf-8").partition("\n")[0]
    report = read_report(folder, task)
    if report is not None:
        return ("interrupted" if report.status == "interrupted" else "ok"), ""
    if not folder.exists():
        return "not started", ""
    return "no result", f"wrote no {REPORT_FILES[task]} that can be read"


def contending(record: JobRecord, others: Sequence[JobRecord]) -> tuple[int, ...]:
    """Numbers of the jobs that slowed this one, perhaps: that ran at the same time on its device.

    A job on the CPU shares it with all jobs of the machine. One that was killed left no end and counts as
    running on, until it was repeated.
    """
    own_begin, own_end = _last_run(record)
    return tuple(
        other.number
        for other in others
        if other.number != record.number
        and other.machine == record.machine
        and record.device in (CPU, other.device)
        and any(begin < own_end and own_begin < end for begin, end in (*other.earlier, _last_run(other)))
    )


def _last_run(record: JobRecord) -> tuple[float, float]:
    """Begin and end of the run that the figures are of."""
    return record.begin, float("inf") if record.end is None else record.end
