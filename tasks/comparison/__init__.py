"""The comparison that ends a sweep: on the terminal, and as JSON, CSV, Markdown and HTML in its folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.output_folder import OutputFolder
from tasks.comparison.data_files import to_csv, to_json
from tasks.comparison.markdown import to_markdown
from tasks.comparison.outcomes import recorded_jobs
from tasks.comparison.page import to_html
from tasks.comparison.rows import JobRow, rows_of
from tasks.comparison.terminal import LoggerKind, show
from tasks.sweep import Job

__all__ = ["compare", "recorded_jobs"]


def compare(jobs: Sequence[Job], folder: Path, *, logger: LoggerKind) -> int:
    """Show and write what became of the jobs of the sweep in `folder`, each beside its eager job.

    logger: `rich`, `plain`, or `quiet`: problems and the path of the page only.
    Returns: the exit code: 0 when every job succeeded and no exact one has other bits than its eager job,
        else 1. Raises: OutputError.
    """
    rows = rows_of(jobs, folder)
    show(rows, folder, logger=logger, file=sys.stdout)  # first: a full disk must not take the tables along
    OutputFolder(folder, lock=None).write(
        {
            "comparison.json": to_json(rows).encode(),
            "comparison.csv": to_csv(rows).encode(),
            "comparison.md": to_markdown(rows).encode(),
            "comparison.html": to_html(rows).encode(),
        }
    )
    return 1 if any(map(_is_problem, rows)) else 0


def _is_problem(row: JobRow) -> bool:
    """Whether the job did not succeed, or broke the promise of equal bits."""
    return row.status != "ok" or bool(row.broken_promises)
