"""Jobs of a sweep: folders that never clash, failures that stay in their own job, jobs done before."""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import re
import secrets
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from omegaconf import OmegaConf

from accel.errors import OutputError, SamebitError
from pipelines.termination import Terminated
from tasks.result_file import RESULT_FILE, read_result

ERROR_FILE = "error.txt"
# What a task writes when it is done; the other tasks leave nothing that jobs could be compared by.
REPORT_FILES = {"run": RESULT_FILE, "verify": "verify.json", "bench": "bench.json", "profile": "profile.json"}

_LONGEST_NAME = 120  # bytes; file systems allow 255, tools add suffixes
_NOT_IN_NAMES = re.compile(r'[\x00-\x1f/\\:*?"<>|]+')

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One job: its overrides as in `JobRecord`, the folder it writes to, and its number in the sweep."""

    overrides: tuple[str, ...]
    folder: Path
    number: int = 0


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

    `sys.exit` counts as a failure too; only Ctrl-C and termination pass through. Memory is freed afterwards,
    also that of a failed job, whose traceback would otherwise keep tensors alive.
    """
    (folder / ERROR_FILE).unlink(missing_ok=True)
    try:
        work()
    except (KeyboardInterrupt, Terminated):
        raise
    except SamebitError as error:  # a mistake of the user, told in one line
        (folder / ERROR_FILE).write_text(f"{error}\n", encoding="utf-8")
        log.error("Job in %s failed: %s", folder, error)
    except BaseException as error:
        text = traceback.format_exc()
        (folder / ERROR_FILE).write_text(f"{type(error).__name__}: {error}\n\n{text}", encoding="utf-8")
        log.error("Job in %s failed:\n%s", folder, text)
    _free_memory()


@dataclass(frozen=True)
class Report:
    """What the results of all tasks have in common."""

    status: str
    config_hash: str


def read_report(folder: Path, task: str) -> Report | None:
    """`None` where there is none that is complete and can be read."""
    file = folder / REPORT_FILES[task]
    try:
        if task == "run":
            result = read_result(file)
            return Report(result.status, result.config_hash)
        return msgspec.json.decode(file.read_bytes(), type=Report)
    except (OutputError, OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def finished_report(folder: Path, task: str) -> Report | None:
    """The report of a job that came to its end without an error; `None` for any other job."""
    report = read_report(folder, task)
    return report if report and report.status == "ok" and not (folder / ERROR_FILE).exists() else None


def set_unfinished_aside(folder: Path, task: str) -> None:
    """Make room for the report of a job that is run again; what an interrupted one measured is kept."""
    report = folder / REPORT_FILES[task]
    if report.exists():
        report.replace(report.with_suffix(".unfinished.json"))


def latency_ms(folder: Path) -> float:
    """What a sweeper minimises: the median wall time of the requests of a `run` after the first, in ms.

    Infinite for a job that did not finish, so that it never looks fast.
    """
    if finished_report(folder, "run") is None:
        return math.inf
    walls = read_result(folder / RESULT_FILE).request["walls_ms"]
    return median(walls) if walls else math.inf


def _free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")  # a job that never loaded torch holds no device memory
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
