"""JSON that means one thing only: no duplicate keys, no NaN or infinity."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from accel.errors import CheckpointError


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object in UTF-8.

    where: names the source in messages.
    Raises: CheckpointError for other encodings, other JSON values, duplicate keys, NaN and infinity.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a JSON {type(value).__name__}, an object is needed.")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Read one JSON object from a file. Raises: CheckpointError, also when the file can't be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}). Check the path.") from error
    return parse_json_object(data, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key '{twice}' appears twice")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
