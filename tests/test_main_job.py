"""The commands of the README, run as a user would: subprocesses, no GPU, no network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {"actions.npy", "actions.json", "actions.png", "canvas.png", "result.json"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "run.py", "device=cpu", "logger=plain", "task.repeats=1", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("main") / "out"
    return run("model=flux3_action", "accel=graph+fused", f"output.dir={folder}"), folder


def test_main_job_turns_the_recorded_observation_into_actions(
    main_job: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, folder = main_job
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} >= FILES
    actions = np.load(folder / "actions.npy")
    assert actions.shape == (32, 8)
    assert actions.dtype == np.float32
    assert np.isfinite(actions).all()
    assert "the outputs mean nothing" in done.stdout


def test_without_cuda_the_table_says_what_was_not_accelerated(
    main_job: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, folder = main_job
    assert "eager (no_cuda)" in done.stdout
    assert "reference (no_cuda)" in done.stdout
    stages = json.loads((folder / "result.json").read_text())["stages"]
    kinds = {(o["kind"], o["reason"]) for stage in stages for o in stage["outcomes"]}
    assert kinds == {("eager", "no_cuda")}


def test_a_sweep_over_policies_gives_the_same_actions(
    main_job: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    done = run("-m", "accel=eager,fused", f"output.dir={tmp_path / 'sweep'}")
    assert done.returncode == 0, done.stderr
    expected = (main_job[1] / "actions.npy").read_bytes()
    for job in ("0", "1"):
        assert (tmp_path / "sweep" / job / "actions.npy").read_bytes() == expected
    assert (tmp_path / "sweep" / "comparison.json").exists()


def test_what_was_planned_and_did_not_happen_is_exit_code_3_when_strict(tmp_path: Path) -> None:
    done = run("accel=graph", "accel.strict=true", f"output.dir={tmp_path / 'out'}")
    assert done.returncode == 3
    assert "no_cuda" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} >= FILES


def test_the_python_example_of_the_readme_runs() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert example is not None
    done = subprocess.run(
        [sys.executable, "-c", example[1]], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "(32, 8)" in done.stdout
