"""What became of the jobs of a sweep: one table, printed and written as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from accel.errors import OutputError
from tasks.result_file import RESULT_FILE, RunResult, read_result
from tasks.sweep import ERROR_FILE, Job

SUMMARY_FILE = "summary.json"

JobStatus = Literal["ok", "interrupted", "failed", "no result", "not started"]

_HEAD = f"{'job':>4}  {'status':<11}  {'p50 ms':>9}  {'cold ms':>9}  {'vs eager':>8}  {'bits':<8}  overrides"
_BITS = {None: "-", True: "as job 0", False: "other"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of a job.

    status: `failed` jobs have an error; `no result` ones ended without a file, or were cut short.
    p50_ms: median of the steady requests; cold_ms: of the first one; `None` where there is none.
    speed_up: p50 of the first eager job over that of this job.
    same_bits: whether every stage output of the first request equals that of job 0.
    """

    job: int
    overrides: tuple[str, ...]
    folder: str
    status: JobStatus
    error: str = ""
    p50_ms: float | None = None
    cold_ms: float | None = None
    speed_up: float | None = None
    same_bits: bool | None = None


def summarise(jobs: Sequence[Job], folder: Path) -> int:
    """Write and print what became of every job.

    Returns: 0 when all jobs are `ok`, else 1.
    """
    rows = _rows(jobs)
    folder.mkdir(parents=True, exist_ok=True)
    table = json.dumps([asdict(row) for row in rows], ensure_ascii=False, indent=2) + "\n"
    (folder / SUMMARY_FILE).write_text(table, encoding="utf-8")
    print(_HEAD)
    for row in rows:
        print(_line(row))
        if row.error:
            print(f"{'':>6}{row.error}")
    succeeded = sum(row.status == "ok" for row in rows)
    print(f"{succeeded} of {len(rows)} jobs succeeded; summary in {folder / SUMMARY_FILE}")
    return 0 if succeeded == len(rows) else 1


def _rows(jobs: Sequence[Job]) -> list[Row]:
    results = [_result(job.folder) for job in jobs]
    measured = [result for result in results if result is not None]
    eager = next((_p50(result) for result in measured if result.config["accel"]["name"] == "eager"), None)
    return [
        _row(number, job, result, eager_ms=eager, first=results[0])
        for number, (job, result) in enumerate(zip(jobs, results, strict=True))
    ]


def _row(
    number: int, job: Job, result: RunResult | None, *, eager_ms: float | None, first: RunResult | None
) -> Row:
    status, error = _status(job.folder, result)
    row = Row(job=number, overrides=job.overrides, folder=str(job.folder), status=status, error=error)
    if result is None:
        return row
    p50 = _p50(result)
    return replace(
        row,
        p50_ms=p50,
        cold_ms=result.request["cold_ms"],
        speed_up=eager_ms / p50 if eager_ms and p50 else None,
        same_bits=result.digests == first.digests if first else None,
    )


def _status(folder: Path, result: RunResult | None) -> tuple[JobStatus, str]:
    error_file = folder / ERROR_FILE
    if error_file.exists():
        return "failed", error_file.read_text(encoding="utf-8").partition("\n")[0]
    if result is not None:
        return ("interrupted" if result.status == "interrupted" else "ok"), ""
    if not folder.exists():
        return "not started", ""
    return "no result", f"wrote no {RESULT_FILE} that can be read"


def _result(folder: Path) -> RunResult | None:
    try:
        return read_result(folder / RESULT_FILE)
    except OutputError:
        return None


def _p50(result: RunResult) -> float | None:
    walls = result.request["walls_ms"]
    return median(walls) if walls else None


def _line(row: Row) -> str:
    times = f"{_ms(row.p50_ms)}  {_ms(row.cold_ms)}"
    gain = f"{row.speed_up:.2f} x" if row.speed_up else "-"
    return (
        f"{row.job:>4}  {row.status:<11}  {times}  {gain:>8}  {_BITS[row.same_bits]:<8}  "
        f"{' '.join(row.overrides)}"
    )


def _ms(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>9}"
