"""Commands from start to end with a stand-in task: failures stay in their job (C16), folders apart (C17)."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from tasks.config import CONF
from tasks.sweep import folder_name, run_isolated

REPO = CONF.parent
C17 = json.loads((Path(__file__).parent.parent / "cases" / "C17_sweeps.json").read_text())

# Replaces the `run` task, so that a sweep takes no model; all the rest is the real program.
PROGRAM = """
import os, runpy, signal, sys, types
sys.path.insert(0, {repo!r})
from tasks.result_file import RunResult, encode_result

def main(config, *, folder):
    seed, prompt, status = config.seed, config.prompt, "ok"
    {behaviour}
    speed = 4.0 if config.accel.name == "eager" else 2.0
    result = RunResult(
        status=status,
        verdict="equal",
        pipeline={{}},
        config={{"seed": seed, "accel": {{"name": config.accel.name}}}},
        config_hash="",
        environment={{}},
        requests=2,
        unequal_outputs=[],
        strict_violations=[],
        request={{"cold_ms": 9.0, "walls_ms": [speed]}},
        stages=[],
        notes=[],
        digests={{"noise": str(seed)}},
        files={{}},
    )
    (folder / "result.json").write_bytes(encode_result(result))
    if status == "interrupted": raise KeyboardInterrupt

sys.modules["tasks.run"] = types.ModuleType("tasks.run")
sys.modules["tasks.run"].main = main
runpy.run_path({script!r}, run_name="__main__")
"""


def program(folder: Path, behaviour: str) -> Path:
    file = folder / "program.py"
    file.write_text(PROGRAM.format(repo=str(REPO), script=str(REPO / "run.py"), behaviour=behaviour))
    return file


def run(folder: Path, *argv: str, behaviour: str = "pass") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program(folder, behaviour)), *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def summary(sweep: Path) -> list[dict[str, Any]]:
    return json.loads((sweep / "summary.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("behaviour", "statuses", "error"),
    [
        ("if seed == 2: raise ValueError('no luck')", "ok failed ok", "ValueError: no luck"),
        ("if seed == 2: sys.exit(3)", "ok failed ok", "SystemExit: 3"),
        ("if seed == 2: sys.exit(0)", "ok failed ok", "SystemExit: 0"),
        ("if seed == 2: return", "ok no-result ok", "wrote no result.json"),
        ("if seed == 2: raise MemoryError('device')", "ok failed ok", "MemoryError: device"),
    ],
)
def test_c16_one_bad_job_leaves_the_others(behaviour: str, statuses: str, error: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "seed=1,2,3", "output.dir=s", behaviour=behaviour)
    rows = summary(tmp_path / "s")
    assert done.returncode == 1
    assert [row["status"].replace(" ", "-") for row in rows] == statuses.split()
    assert rows[1]["error"].startswith(error)
    assert rows[1]["overrides"][0] == "seed=2"
    assert "2 of 3 jobs succeeded" in done.stdout
    if "failed" in statuses:
        assert "Traceback" in (tmp_path / "s" / "1" / "error.txt").read_text()
        assert "Traceback" in (tmp_path / "s" / "1" / "run.log").read_text()


def test_c16_different_failures_are_all_told(tmp_path: Path) -> None:
    behaviour = "if seed < 3: raise ValueError(f'luck {seed}')"
    done = run(tmp_path, "-m", "seed=1,2,3", "output.dir=s", behaviour=behaviour)
    assert done.returncode == 1
    assert [row["error"] for row in summary(tmp_path / "s")] == [
        "ValueError: luck 1",
        "ValueError: luck 2",
        "",
    ]


def test_c16_an_invalid_value_is_refused_before_the_first_job(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "seed=1,-2,3", "output.dir=s")
    assert done.returncode == 2
    assert "seed: expected a whole number" in done.stderr
    assert not (tmp_path / "s").exists()


def test_c17_jobs_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, *C17[0]["args"])
    assert done.returncode == 2
    assert "jobs 0 and 1 would both write" in done.stderr
    assert not (tmp_path / "multirun").exists()


# `checkpoint` is a placeholder of the case; here it is weights.path.
C17_NAMES = [[arg.replace("checkpoint=", "weights.path=") for arg in row["args"]] for row in C17[1:]]


@pytest.mark.parametrize("args", C17_NAMES, ids=["paths", "long", "unicode"])
def test_c17_values_as_folder_names(args: list[str], tmp_path: Path) -> None:
    weights = ["weights=local"] if "weights.path" in args[1] else []
    done = run(tmp_path, *args, *weights, "output.dir=s")
    assert done.returncode == 0, done.stderr
    rows = summary(tmp_path / "s")
    folders = [Path(row["folder"]) for row in rows]
    assert len(set(folders)) == 2
    assert all(folder.parent == tmp_path / "s" and len(folder.name.encode()) <= 120 for folder in folders)
    assert all((folder / "result.json").exists() for folder in folders)
    swept = args[1].partition("=")[2]
    for row in rows:
        (override,) = [text for text in row["overrides"] if text.startswith(args[1].partition("=")[0])]
        assert override.partition("=")[2] in swept
        saved = (Path(row["folder"]) / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")
        assert override in yaml.safe_load(saved)


def test_c17_a_second_sweep_never_replaces_results(tmp_path: Path) -> None:
    assert run(tmp_path, "-m", "seed=1,2", "output.dir=s").returncode == 0
    again = run(tmp_path, "-m", "seed=3,4", "output.dir=s")
    assert again.returncode == 2
    assert "already holds a result.json" in again.stderr
    assert json.loads((tmp_path / "s" / "0" / "result.json").read_text())["config"]["seed"] == 1


def test_a_mistake_of_the_user_in_one_job_is_one_line(tmp_path: Path) -> None:
    behaviour = "from accel.errors import ConfigError"
    behaviour += "\n    if seed == 2: raise ConfigError('no such frame')"
    done = run(tmp_path, "-m", "seed=1,2", "output.dir=s", behaviour=behaviour)
    assert done.returncode == 1
    assert summary(tmp_path / "s")[1]["error"] == "no such frame"
    assert (tmp_path / "s" / "1" / "error.txt").read_text() == "no such frame\n"
    assert "Traceback" not in done.stdout + done.stderr


def test_ctrl_c_in_a_sweep_tells_which_jobs_ran(tmp_path: Path) -> None:
    behaviour = "if seed == 2: status = 'interrupted'"
    done = run(tmp_path, "-m", "seed=1,2,3", "output.dir=s", behaviour=behaviour)
    assert done.returncode == 130
    assert done.stderr == "Interrupted.\n"
    assert [row["status"] for row in summary(tmp_path / "s")] == ["ok", "interrupted", "not started"]


def test_the_summary_compares_jobs_with_eager_and_with_job_0(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "accel=graph,eager", "seed=1,2", "output.dir=s")
    assert done.returncode == 0, done.stderr
    rows = summary(tmp_path / "s")
    assert [(row["p50_ms"], row["cold_ms"], row["speed_up"]) for row in rows] == [
        *[(2.0, 9.0, 2.0)] * 2,
        *[(4.0, 9.0, 1.0)] * 2,
    ]
    assert [row["same_bits"] for row in rows] == [True, False, True, False]
    assert "2.00 x" in done.stdout


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_a_run_in_one_line(name: str, code: int, tmp_path: Path) -> None:
    behaviour = f"os.kill(os.getpid(), signal.{name})"
    done = run(tmp_path, "output.dir=s", behaviour=behaviour)
    assert done.returncode == code
    assert done.stderr == f"Ended by {name}.\n"
    assert not (tmp_path / "s" / "run.log").exists()


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    program(tmp_path, "print('line\\n' * 100_000)")
    command = f"{sys.executable} program.py output.dir=s | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("line\n0\n", "")
    assert (tmp_path / "s" / "result.json").exists()


@pytest.mark.parametrize("place", ["file/below", "file", "/dev/null", "/proc/foo", "x" * 300])
def test_a_folder_that_cannot_be_written_is_one_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(tmp_path, f"output.dir={place}")
    assert done.returncode == 2
    assert "can't be written to" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_is_not_installed_is_said_with_the_remedy(tmp_path: Path) -> None:
    command = [sys.executable, "-S", str(REPO / "run.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "make run" in done.stderr
    assert done.stderr.count("\n") == 1


def test_sigterm_while_a_job_writes_ends_the_sweep(tmp_path: Path) -> None:
    behaviour = "from pipelines.output_folder import OutputFolder; import os, signal; "
    behaviour += "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGTERM); "
    behaviour += "OutputFolder(folder, None).write({'actions.npy': b'new'})"
    done = run(tmp_path, "-m", "seed=1,2", "output.dir=s", behaviour=behaviour)
    assert done.returncode == 143
    assert [row["status"] for row in summary(tmp_path / "s")] == ["no result", "not started"]
    assert not (tmp_path / "s" / "1").exists()


def test_a_failed_job_leaves_no_memory_behind(tmp_path: Path, monkeypatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(held() is None))

    class Model:
        def __init__(self) -> None:
            self.itself = self

    def work() -> None:
        nonlocal held
        model = Model()
        held = weakref.ref(model)
        raise ValueError("no luck")

    held: Callable[[], Model | None] = lambda: None  # noqa: E731
    gc.disable()
    try:
        run_isolated(work, tmp_path)
    finally:
        gc.enable()
    assert emptied == [True]


@pytest.mark.parametrize(
    ("error", "code"),
    [("ConfigError", 2), ("StrictModeError", 3), ("KeyboardInterrupt", 130), ("KeyError", 1)],
)
def test_exit_codes_of_a_single_run(error: str, code: int, tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "seed=1",
        behaviour=f"from accel.errors import ConfigError, StrictModeError; raise {error}('one line')",
    )
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (code == 1)
    if code in (2, 3):
        assert done.stderr == "one line\n"


def test_folder_names_are_short_legal_and_distinct() -> None:
    assert folder_name("seed=1,accel=graph+fused") == "seed=1,accel=graph+fused"
    assert "/" not in folder_name("p=a/b")
    assert folder_name("p=a/b") != folder_name("p=a-b")
    assert folder_name("x" * 300) != folder_name("x" * 301)
    assert len(folder_name("猫" * 300).encode()) <= 120
    assert folder_name("..") not in ("", ".", "..")
