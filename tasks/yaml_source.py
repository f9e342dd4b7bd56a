"""YAML files as they were written: the text of every value and the line it stands on.

The YAML loader turns `010` into 8 and keeps the last of two equal keys. This module reads the
same file once more, refuses both, and remembers the text of each value for error messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from accel.errors import ConfigError

# YAML 1.1 reads these whole numbers in base 8 or base 60, which nobody who types them means.
_OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+)")

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Written:
    """A value as its author typed it. place: "file:line", or `COMMAND_LINE`."""

    text: str
    place: str


Source = Mapping[str, Written]
"""Dotted configuration key -> how and where it was written."""


def scan(path: Path, *, package: str = "") -> dict[str, Written]:
    """Every value of a YAML file by dotted key, each key put under `package`.

    Raises: ConfigError for a key that stands twice in one mapping (with both lines), a whole
        number that YAML would read in another base, and text that is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_shown(path)}: not UTF-8 text ({error.reason}). Save it as UTF-8.") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{_shown(path)}:{line}: not valid YAML: {error.problem}.") from error
    if not isinstance(root, yaml.MappingNode):
        return {}
    return {
        key: Written(text[node.start_mark.index : node.end_mark.index].strip(), f"{_shown(path)}:{line}")
        for key, line, node in _values(root, package, path)
    }


def _values(mapping: yaml.MappingNode, prefix: str, path: Path) -> Iterator[tuple[str, int, yaml.Node]]:
    """Dotted key, line of the key and value of every entry, at every depth."""
    lines: dict[str, int] = {}
    for key_node, value in mapping.value:
        if not prefix and key_node.value == "defaults":  # Hydra's own list, not part of the result
            continue
        name, line = str(key_node.value), key_node.start_mark.line + 1
        key = f"{prefix}.{name}" if prefix else name
        if name in lines:
            raise ConfigError(
                f"{_shown(path)}: key '{key}' stands twice, on line {lines[name]} and on line {line}. "
                "Keep one of them."
            )
        lines[name] = line
        _refuse_other_base(key, value, path)
        yield key, line, value
        if isinstance(value, yaml.MappingNode):
            yield from _values(value, key, path)


def _refuse_other_base(key: str, node: yaml.Node, path: Path) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_other_base(key, item, path)
    elif isinstance(node, yaml.ScalarNode) and node.style is None and _OTHER_BASE.fullmatch(node.value):
        place = f"{_shown(path)}:{node.start_mark.line + 1}"
        raise ConfigError(
            f"{place}: {key}: {node.value} would be read as a number in another base. "
            f"For text write '{node.value}' in quotes; for a number drop leading zeros and colons."
        )


def _shown(path: Path) -> str:
    """The path relative to the working directory where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)
