"""Local paths and Hugging Face hub ids, resolved to a path on disk.

An id reads `repo_id[:file_or_subfolder][@revision]` (spec section 2). Downloads go through huggingface_hub
into its own cache; what is cached is found again without a network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from accel.errors import CheckpointError

_REPO_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")


@dataclass(frozen=True)
class HubId:
    """One place on the hub. part: file or subfolder; revision: branch, tag or commit."""

    repo: str
    part: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, spec: str) -> HubId:
        """Split at the first `@`, then at the first `:`. Raises: CheckpointError if it is no hub id."""
        place, _, revision = spec.partition("@")
        repo, _, part = place.partition(":")
        if not _REPO_ID.fullmatch(repo) or ".." in repo or not _is_inside(part):
            raise CheckpointError(
                f"'{spec}': no such path, and not a hub id either. Use an existing path or "
                "repo_id[:file_or_subfolder][@revision]."
            )
        return cls(repo, part.strip("/") or None, revision or None)

    def __str__(self) -> str:
        part = f":{self.part}" if self.part else ""
        return self.repo + part + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Where downloads come from and go to; `None` leaves it to huggingface_hub."""

    endpoint: str | None = None
    cache_dir: Path | None = None

    def file(self, where: HubId) -> Path:
        """The file `where.part`. Raises: CheckpointError naming the id and the remedy."""
        name = where.part or ""
        file = self._snapshot(where, [name]) / name
        if not file.is_file():
            raise CheckpointError(
                f"'{where}': no such file in the repository, or in the cache when offline. "
                "Check what follows ':'."
            )
        return file

    def folder(self, where: HubId, *, files: Sequence[str] = _MODEL_FILES) -> Path:
        """The subfolder `where.part`, or the whole repository, holding the files of the given patterns.

        Raises: CheckpointError naming the id and the remedy.
        """
        part = where.part or ""
        inside = f"{part}/" if part else ""
        # A `*` of the hub matches slashes too: folders below may hold other weights of many GB.
        folder = self._snapshot(where, [inside + name for name in files], ignore=f"{inside}*/*") / part
        if not folder.is_dir() or not any(folder.iterdir()):
            raise CheckpointError(f"'{where}': no model files there. Check the subfolder and the revision.")
        return folder

    def _snapshot(self, where: HubId, patterns: list[str], *, ignore: str | None = None) -> Path:
        with _explained(where):
            return Path(
                snapshot_download(
                    where.repo,
                    revision=where.revision,
                    allow_patterns=patterns,
                    ignore_patterns=ignore,
                    endpoint=self.endpoint,
                    cache_dir=self.cache_dir,
                )
            )


def resolve(
    spec: str, *, default_file: str | None = None, relative_to: Sequence[Path] = (), hub: Hub | None = None
) -> Path:
    """Path of what a package names: an existing local path, else a hub id.

    default_file: set when one file is wanted; its name where the spec gives none. Without it the
        result is a folder.
    relative_to: folders that a relative path is tried against, before the working directory.
    Raises: CheckpointError when neither a path nor the hub has it.
    """
    if not spec:
        raise CheckpointError("empty path or hub id. Use a path or repo_id[:file_or_subfolder][@revision].")
    for base in (*relative_to, Path()):
        path = base / expanduser(spec)
        if path.exists():
            return path / default_file if default_file and path.is_dir() else path
    where = HubId.parse(spec)
    hub = hub or Hub()
    if default_file is None:
        return hub.folder(where)
    return hub.file(HubId(where.repo, where.part or default_file, where.revision))


def _is_inside(part: str) -> bool:
    """Whether it names one place within a repository: not absolute, not upwards, no pattern."""
    return not (part.startswith("/") or ".." in part.split("/") or set(part) & set("*?["))


@contextmanager
def _explained(where: HubId) -> Iterator[None]:
    """Turn what huggingface_hub raises into one message with a remedy."""
    try:
        yield
    except GatedRepoError as error:
        fault = "access is restricted. Accept its terms on the hub and log in with `hf auth login`"
        raise CheckpointError(f"'{where}': {fault}.") from error
    except RepositoryNotFoundError as error:
        fault = "no such path, and no such repository on the hub"
        raise CheckpointError(f"'{where}': {fault}. Check the name; log in for a private one.") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"'{where}': the repository has no such revision. Check what follows '@'."
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"'{where}': not in the local cache, and the hub can't be reached. "
            "Go online once, or give the path of a local copy."
        ) from error
    except HFValidationError as error:
        raise CheckpointError(f"'{where}': not a valid hub id ({error}).") from error
    except OSError as error:
        # Network faults, HTTP statuses and full disks.
        detail = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"'{where}': download failed ({detail}). "
            "Check the network and the free disk space, then try again."
        ) from error
