"""JSON files of saved folders, changed for a while."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def changed(file: Path, **values: object) -> Iterator[None]:
    """Other values of these keys inside the `with` block; then the file is as it was."""
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | values))
    try:
        yield
    finally:
        file.write_text(before)
