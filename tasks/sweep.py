"""Jobs of a sweep: folders that never clash, failures that stay in their own job, one summary."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import re
import secrets
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf

from tasks.result_file import RESULT_FILE

ERROR_FILE, SUMMARY_FILE = "error.txt", "summary.json"

_LONGEST_NAME = 120  # bytes; file systems allow 255, tools add suffixes
_NOT_IN_NAMES = re.compile(r'[\x00-\x1f/\\:*?"<>|]+')

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One job: its overrides as Hydra gets them, and the folder it writes to."""

    overrides: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class Row:
    """What became of a job; error is empty for `ok`."""

    job: int
    overrides: tuple[str, ...]
    folder: str
    status: Literal["ok", "failed", "no result"]
    error: str


def register_resolvers() -> None:
    """Make `${unique:}` and `${folder_name:TEXT}` known to configurations."""
    OmegaConf.register_new_resolver("unique", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)


def folder_name(text: str) -> str:
    """`text` as the name of one folder: no separators, at most 120 bytes.

    A name that had to change ends in a hash of the text, so different texts keep different names.
    """
    clean = _NOT_IN_NAMES.sub("-", text).strip(" .")
    if clean == text and clean and len(clean.encode()) <= _LONGEST_NAME:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    short = clean.encode()[: _LONGEST_NAME - len(digest) - 1].decode(errors="ignore")
    return f"{short}-{digest}"


def run_isolated(work: Callable[[], object], folder: Path) -> None:
    """Run one job so that whatever it raises ends in its own folder and the others go on.

    `sys.exit` counts as a failure too; only Ctrl-C passes through. Memory is freed afterwards,
    also that of a failed job, whose traceback would otherwise keep tensors alive.
    """
    (folder / ERROR_FILE).unlink(missing_ok=True)
    try:
        work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = traceback.format_exc()
        (folder / ERROR_FILE).write_text(f"{type(error).__name__}: {error}\n\n{text}", encoding="utf-8")
        log.error("Job in %s failed:\n%s", folder, text)
    _free_memory()


def summarise(jobs: Sequence[Job], folder: Path) -> int:
    """Write and print what became of every job.

    Returns: 0 when all jobs have a result, else 1.
    """
    rows = [_row(number, job) for number, job in enumerate(jobs)]
    folder.mkdir(parents=True, exist_ok=True)
    table = [vars(row) for row in rows]
    (folder / SUMMARY_FILE).write_text(
        json.dumps(table, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
    )
    for row in rows:
        print(f"{row.job:>4}  {row.status:<9}  {' '.join(row.overrides)}")
        if row.error:
            print(f"{'':>17}{row.error}")
    failed = sum(row.status != "ok" for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} jobs succeeded; summary in {folder / SUMMARY_FILE}")
    return 1 if failed else 0


def _row(number: int, job: Job) -> Row:
    error_file = job.folder / ERROR_FILE
    if error_file.exists():
        first_line = error_file.read_text(encoding="utf-8").partition("\n")[0]
        return Row(number, job.overrides, str(job.folder), "failed", first_line)
    if not (job.folder / RESULT_FILE).exists():
        return Row(number, job.overrides, str(job.folder), "no result", f"wrote no {RESULT_FILE}")
    return Row(number, job.overrides, str(job.folder), "ok", "")


def _free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")  # a job that never loaded torch holds no device memory
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
