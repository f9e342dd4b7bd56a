"""Jobs of a sweep: folders that never clash, failures that stay in their own job."""

from __future__ import annotations

import gc
import hashlib
import logging
import re
import secrets
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from accel.errors import SamebitError
from pipelines.termination import Terminated

ERROR_FILE = "error.txt"

_LONGEST_NAME = 120  # bytes; file systems allow 255, tools add suffixes
_NOT_IN_NAMES = re.compile(r'[\x00-\x1f/\\:*?"<>|]+')

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One job: its overrides as Hydra gets them, and the folder it writes to."""

    overrides: tuple[str, ...]
    folder: Path


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


def _free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")  # a job that never loaded torch holds no device memory
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
