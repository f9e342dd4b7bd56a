"""A folder that results are written to: checked early, one run at a time, files whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from accel.errors import OutputError
from pipelines.termination import ending_cleanly

if sys.platform != "win32":
    import fcntl


# More than what is written before the work starts, so that a full disk shows at once.
_PROBE_BYTES = 2**16


class OutputFolder:
    """A claimed, writable folder.

    Claiming happens before long work, so that a folder that can't be written to is noticed at
    once. The claim is a lock on the folder itself: it leaves no file and ends with the process,
    however the process ends. File systems without locks (and Windows) skip it; there two runs
    in one folder still write whole files, but the later one wins.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, path: Path, *, result_name: str) -> OutputFolder:
        """Create the folder if needed, prove that it can be written to and lock it.

        result_name: the file that marks a finished run; a folder holding it is refused, so that
        no result is ever replaced unasked.
        Raises: OutputError when the folder can't be written, is in use or holds a result.
        """
        prove_writable(path)
        folder = cls(path, _lock(path))
        if (path / result_name).exists():
            folder.close()
            raise OutputError(
                f"Output folder '{path}' already holds a result ({result_name}), which is not replaced. "
                "Choose another one with output.dir=... or move the old result away."
            )
        return folder

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files by name: first all of them aside, then each to its final name.

        A full disk or a signal shows while the files are still aside: then files that existed
        before are untouched byte for byte, no half file carries a final name and nothing is
        left over.
        Raises: OutputError saying which files are written; Terminated.
        """
        written: list[str] = []
        try:
            for name in files:
                if (self.path / name).is_dir():
                    raise IsADirectoryError(errno.EISDIR, f"'{name}' is a folder")
            with ending_cleanly(), _staged(self.path, files) as staged:
                for name, temporary in staged.items():
                    os.replace(temporary, self.path / name)
                    written.append(name)
                _sync_folder(self.path)
        except OSError as error:
            raise OutputError(
                f"Could not write {', '.join(files)} to '{self.path}': {_why(error)}. "
                f"Written: {', '.join(written) or 'none; files that were there before are unchanged'}. "
                "Free some space or choose another output.dir."
            ) from error

    def close(self) -> None:
        """Give up the claim."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prove_writable(path: Path) -> None:
    """Create the folder if needed. Raises: OutputError when it can't be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _staged(path, {"probe": bytes(_PROBE_BYTES)}):
            pass
    except OSError as error:
        raise OutputError(
            f"Output folder '{path}' can't be written to: {_why(error)}. "
            "Choose another one with output.dir=..."
        ) from error


@contextlib.contextmanager
def _staged(folder: Path, files: Mapping[str, bytes]) -> Iterator[dict[str, Path]]:
    """Every file on disk under a temporary name; what was not renamed is removed at the end."""
    staged: dict[str, Path] = {}
    try:
        for name, data in files.items():
            # Short whatever the length of the name, and never shared by two writers.
            staged[name] = folder / f".{secrets.token_hex(8)}.tmp"
            with open(staged[name], "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        yield staged
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _lock(path: Path) -> int | None:
    """Hold the folder for this process; `None` where the file system has no locks."""
    if sys.platform == "win32":
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OutputError(
            f"Output folder '{path}' is in use by another run. Choose another one with output.dir=..."
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sync_folder(path: Path) -> None:
    """Make the new names survive a power loss, where the file system can promise that."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why(error: OSError) -> str:
    return error.strerror or str(error)
