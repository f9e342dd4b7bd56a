"""ARCHITECTURE.md names what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", (ROOT / "ARCHITECTURE.md").read_text()))


def modules(*rooms: str) -> set[str]:
    files = (file for room in rooms for file in (ROOT / room).rglob("*.py"))
    return {file.name for file in files if file.name not in ("__init__.py", "__main__.py")}


def test_every_module_of_the_pipelines_is_named() -> None:
    assert modules("pipelines") - NAMED == set()


def test_what_is_named_exists() -> None:
    assert NAMED - modules("accel", "pipelines", "stages", "tasks", "tests") - {"run.py"} == set()
