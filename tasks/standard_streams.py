"""Standard output and error that may lose their reader, as in `run.py | head -1`, without ending the run."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _LastingFile(io.FileIO):
    """Drops what can't be delivered: a closed pipe, a terminal that hung up, a full disk."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def keep_standard_streams() -> None:
    """From here on a run goes on, and writes its results, whoever stopped listening."""
    sys.stdout = _lasting(sys.stdout)
    sys.stderr = _lasting(sys.stderr)


def _lasting(stream: TextIO | None) -> Any:
    """`stream` in its own encoding; one that was closed from the start goes nowhere."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,  # progress shows at once, in logs too
    )
