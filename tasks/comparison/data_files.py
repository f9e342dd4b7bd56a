"""The comparison for other programs: JSON with everything, CSV with one line a job and stage."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tasks.comparison.findings import REQUEST
from tasks.comparison.rows import JobRow
from tasks.comparison.tables import fallback_calls, note

SCHEMA = 1

_JOB_FIELDS = (
    *("job", "status", "error", "task", "model", "accel", "device", "eager_job", "compared_with"),
    *("folder", "begin", "end"),
)
_FIGURES = (
    *("stage", "tier", "p50_ms", "p95_ms", "cold_ms", "speed_up", "gpu_busy"),
    *("launches", "host_launches", "extra_bytes", "equal", "relative_error"),
)


def to_json(rows: Sequence[JobRow]) -> str:
    """{"schema": 1, "jobs": [...]}: the fields of `JobRow`, ms, bytes and shares of 1."""
    jobs = [asdict(row) for row in rows]
    return json.dumps({"schema": SCHEMA, "jobs": jobs}, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def to_csv(rows: Sequence[JobRow]) -> str:
    """Whole requests as stage "request". A job without a result has one line, its figures empty."""
    text = io.StringIO()
    columns = (*_JOB_FIELDS, "overrides", "contended_with", "note", *_FIGURES, "fallbacks")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(line for row in rows for line in _lines(row))
    return text.getvalue()


def _lines(row: JobRow) -> Iterator[dict[str, Any]]:
    job = {name: getattr(row, name) for name in _JOB_FIELDS}
    job |= {
        "overrides": " ".join(row.overrides),
        "contended_with": " ".join(map(str, row.contended_with)),
        "note": note(row),
    }
    if not row.figures:
        yield job | {"stage": REQUEST}
    for figures in row.figures:
        measured = {name: getattr(figures, name) for name in _FIGURES}
        yield job | measured | {"fallbacks": fallback_calls(figures)}
