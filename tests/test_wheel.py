"""The wheel is whole: every module, and every configuration file that composing needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("accel", "stages", "pipelines", "tasks", "conf")
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


def test_the_wheel_holds_all_modules_and_the_configuration(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    needed = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".yaml", ".j2", ".css", ".js")
    }
    assert needed <= held
    assert "conf/config.yaml" in needed
