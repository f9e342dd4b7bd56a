"""Commands from start to end with a stand-in task: failures stay in their job (C16), folders apart (C17)."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from sweep_examples import write_job

from tasks.config import CONF
from tasks.sweep import folder_name, run_isolated

REPO = CONF.parent
C17 = json.loads((Path(__file__).parent.parent / "cases" / "C17_sweeps.json").read_text())

# Replaces the `run` task, so that a sweep takes no model; all the rest is the real program.
PROGRAM = """
import os, runpy, signal, sys, types
sys.path[:0] = [{repo!r}, {here!r}]
from sweep_examples import example_result
from tasks.config import config_hash
from tasks.result_file import encode_result

def main(config, *, folder):
    seed, prompt, status = config.seed, config.prompt, "ok"
    {behaviour}
    walls = [4.0] if config.accel.name == "eager" else [2.0]
    result = example_result(
        accel=config.accel.name, seed=seed, walls_ms=walls, status=status, config_hash=config_hash(config)
    )
    (folder / "result.json").write_bytes(encode_result(result))
    if status == "interrupted": raise KeyboardInterrupt

sys.modules["tasks.run"] = types.ModuleType("tasks.run")
sys.modules["tasks.run"].main = main
runpy.run_path({script!r}, run_name="__main__")
"""

# run.py, with Ctrl-C in the moment when a module is looked for.
INTERRUPTED = """
import signal, sys
sys.path.insert(0, {repo!r})

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({module!r}):
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
__file__ = {script!r}
exec(compile(open(__file__).read(), __file__, "exec"))
"""


def program(folder: Path, behaviour: str) -> Path:
    file = folder / "program.py"
    text = PROGRAM.format(
        repo=str(REPO), here=str(Path(__file__).parent), script=str(REPO / "run.py"), behaviour=behaviour
    )
    file.write_text(text)
    return file


def run(folder: Path, *argv: str, behaviour: str = "pass") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program(folder, behaviour)), *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def compared(sweep: Path) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = json.loads((sweep / "comparison.json").read_text(encoding="utf-8"))["jobs"]
    return jobs


def statuses(sweep: Path) -> list[str]:
    return [row["status"] for row in compared(sweep)]


def test_c16_bad_jobs_leave_the_others(tmp_path: Path) -> None:
    behaviour = "from accel.errors import ConfigError"
    for seed, fault in {
        2: "raise ValueError('no luck')",
        3: "sys.exit(3)",
        4: "sys.exit(0)",
        5: "return",
        6: "raise MemoryError('device')",
        7: "raise ConfigError('no such frame')",
    }.items():
        behaviour += f"\n    if seed == {seed}: {fault}"
    done = run(tmp_path, "-m", "seed=1,2,3,4,5,6,7,8", "output.dir=s", behaviour=behaviour)
    assert done.returncode == 1
    rows = compared(tmp_path / "s")
    assert [(row["overrides"][0], row["status"], row["error"]) for row in rows] == [
        ("seed=1", "ok", ""),
        ("seed=2", "failed", "ValueError: no luck"),
        ("seed=3", "failed", "SystemExit: 3"),
        ("seed=4", "failed", "SystemExit: 0"),
        ("seed=5", "no result", "wrote no result.json that can be read"),
        ("seed=6", "failed", "MemoryError: device"),
        ("seed=7", "failed", "no such frame"),
        ("seed=8", "ok", ""),
    ]
    assert "2 of 8 jobs succeeded" in done.stdout
    for job in ("1", "2", "3", "5"):
        assert "Traceback" in (tmp_path / "s" / job / "error.txt").read_text()
        assert "Traceback" in (tmp_path / "s" / job / "run.log").read_text()
    assert (tmp_path / "s" / "6" / "error.txt").read_text() == "no such frame\n"


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
    rows = compared(tmp_path / "s")
    folders = [tmp_path / "s" / row["folder"] for row in rows]
    assert len(set(folders)) == 2
    assert all(folder.parent == tmp_path / "s" and len(folder.name.encode()) <= 120 for folder in folders)
    assert all((folder / "result.json").exists() for folder in folders)
    swept = args[1].partition("=")[2]
    for row, folder in zip(rows, folders, strict=True):
        (override,) = [text for text in row["overrides"] if text.startswith(args[1].partition("=")[0])]
        assert override.partition("=")[2] in swept
        saved = (folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")
        assert override in yaml.safe_load(saved)


def test_a_sweep_that_was_cut_short_is_resumed_and_never_replaced(tmp_path: Path) -> None:
    sweep, command = tmp_path / "s", ("-m", "seed=1,2,3", "output.dir=s")
    done = run(tmp_path, *command, behaviour="if seed == 2: status = 'interrupted'")
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")
    assert statuses(sweep) == ["ok", "interrupted", "not started"]
    first = (sweep / "0" / "result.json").stat().st_mtime_ns
    partial = (sweep / "1" / "result.json").read_bytes()

    again = run(tmp_path, *command)
    assert again.returncode == 2
    assert "already holds a result.json" in again.stderr
    assert "go on with that sweep: its command with output.resume=true" in again.stderr

    other = run(tmp_path, "-m", "seed=4,2,3", "output.dir=s", "output.resume=true")
    assert other.returncode == 2
    assert "holds the result of other settings" in other.stderr
    assert statuses(sweep) == ["ok", "interrupted", "not started"]

    resumed = run(tmp_path, *command, "output.resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert statuses(sweep) == ["ok", "ok", "ok"]
    assert (sweep / "0" / "result.json").stat().st_mtime_ns == first
    assert (sweep / "1" / "result.unfinished.json").read_bytes() == partial


def test_a_folder_holds_one_sweep_whatever_its_jobs_are_called(tmp_path: Path) -> None:
    write_job(tmp_path / "s", 7, "accel=eager", error="no luck")
    done = run(tmp_path, "-m", "seed=1,2", "output.dir=s")
    assert done.returncode == 2
    assert "already holds jobs of a sweep" in done.stderr
    assert "output.resume=true" in done.stderr


def test_a_sweep_is_not_resumed_with_another_task(tmp_path: Path) -> None:
    job = write_job(tmp_path / "s", 0, "accel=graph", "task=verify")
    (job.folder / "verify.json").write_text('{"status": "ok", "config_hash": "aa"}')
    done = run(tmp_path, "-m", "accel=graph", "task=bench", "output.dir=s", "output.resume=true")
    assert done.returncode == 2
    assert "holds a job of task=verify, and a sweep of task=bench needs a folder of its own" in done.stderr


@pytest.mark.parametrize("task", ["serve", "client"])
def test_a_sweep_of_what_leaves_no_result_is_refused(task: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-m", f"task={task}", "seed=1,2", "output.dir=s")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"-m compares jobs, and task={task} leaves no result. Leave -m out.\n"
    assert not (tmp_path / "s").exists()


def test_a_second_bench_leaves_the_first_one_whole(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "bench.json").write_text("{}")
    done = run(tmp_path, "task=bench", "output.dir=s")
    assert done.returncode == 2
    assert "already holds a result (bench.json)" in done.stderr
    assert [entry.name for entry in (tmp_path / "s").iterdir()] == ["bench.json"]


def test_a_disk_that_fills_up_costs_the_job_alone(tmp_path: Path) -> None:
    behaviour = "import errno; from pathlib import Path; write = Path.write_text"
    behaviour += (
        "\n    def full(*_, **__): Path.write_text = write; raise OSError(errno.ENOSPC, 'No space left')"
    )
    behaviour += "\n    if seed == 1: Path.write_text = full; raise OSError(errno.ENOSPC, 'No space left')"
    done = run(tmp_path, "-m", "seed=1,2", "output.dir=s", behaviour=behaviour)
    assert done.returncode == 1
    assert statuses(tmp_path / "s") == ["no result", "ok"]
    assert "can't say what became of it: [Errno 28] No space left" in (tmp_path / "s/0/run.log").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["seed=1", "output.dir=s"], "Repeat the sweep's command, with -m"),
        (["-m", "seed=1,2"], "holds no sweep to go on with"),
        (["-m", "seed=1,2", "output.dir=s"], "holds no sweep to go on with"),
    ],
)
def test_resuming_where_there_is_nothing_to_resume_is_refused(
    argv: list[str], message: str, tmp_path: Path
) -> None:
    done = run(tmp_path, *argv, "output.resume=true")
    assert done.returncode == 2
    assert message in done.stderr


def test_models_are_swept_with_settings_that_the_default_model_lacks(tmp_path: Path) -> None:
    sweep = ("-m", "model=flux2_klein,ltx2", "model.height=64", "model.width=64,128", "output.dir=out")
    done = run(tmp_path, *sweep)
    assert done.returncode == 0, done.stderr
    jobs = [(job["status"], *job["overrides"][:3]) for job in compared(tmp_path / "out")]
    assert jobs == [
        ("ok", f"model={model}", "model.height=64", f"model.width={width}")
        for model in ("flux2_klein", "ltx2")
        for width in (64, 128)
    ]


def test_a_setting_that_one_of_the_swept_models_lacks_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "model=flux2_klein,ltx2", "model.frames=9", "output.dir=out")
    assert done.returncode == 2
    assert "model.frames" in done.stderr
    assert not (tmp_path / "out").exists()


def test_each_job_is_compared_with_the_eager_job_of_its_seed(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "accel=graph,eager", "seed=1,2", "output.dir=s")
    assert done.returncode == 0, done.stderr
    rows = compared(tmp_path / "s")
    assert [row["eager_job"] for row in rows] == [2, 3, 2, 3]
    assert [row["figures"][0]["speed_up"] for row in rows] == [2.0, 2.0, 1.0, 1.0]
    assert all(row["figures"][0]["equal"] for row in rows)
    assert "2.00 x" in done.stdout
    assert {file.name for file in (tmp_path / "s").glob("comparison.*")} == {
        f"comparison.{kind}" for kind in ("json", "csv", "md", "html")
    }


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("module", ["", "hydra", "torch"])
def test_ctrl_c_while_modules_load_is_one_line(module: str, tmp_path: Path) -> None:
    """The first one that Python has not loaded by itself, and later ones."""
    text = INTERRUPTED.format(repo=str(REPO), module=module, script=str(REPO / "run.py"))
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "program.py", "device=cpu", "output.dir=s"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_a_run_in_one_line(name: str, code: int, tmp_path: Path) -> None:
    behaviour = f"os.kill(os.getpid(), signal.{name})"
    done = run(tmp_path, "output.dir=s", behaviour=behaviour)
    assert done.returncode == code
    assert done.stderr == f"Ended by {name}.\n"
    assert not (tmp_path / "s" / "run.log").exists()


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    program(tmp_path, "os.kill(os.getpid(), signal.SIGHUP)")
    command = ["nohup", sys.executable, "program.py", "output.dir=s"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120).returncode == 0
    assert (tmp_path / "s" / "result.json").exists()


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    program(tmp_path, "print('line\\n' * 100_000)")
    command = f"{sys.executable} program.py output.dir=s | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("line\n0\n", "")
    assert (tmp_path / "s" / "result.json").exists()


def test_a_program_started_without_standard_streams_runs(tmp_path: Path) -> None:
    program(tmp_path, "print('line'); sys.stdout.isatty()")
    command = f"{sys.executable} program.py output.dir=s >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=120).returncode == 0
    assert (tmp_path / "s" / "result.json").exists()


@pytest.mark.parametrize("place", ["file/below", "file", "/dev/null", "/proc/foo", "x" * 300])
def test_a_folder_that_cannot_be_written_is_one_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(tmp_path, f"output.dir={place}")
    assert done.returncode == 2
    assert "can't be written to" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("resume", [True, False])
def test_a_sweep_does_not_start_where_a_job_cannot_be_written(resume: bool, tmp_path: Path) -> None:
    if resume:
        write_job(tmp_path / "s", 0, "accel=eager", error="no luck")
    (tmp_path / "s").mkdir(exist_ok=True)
    (tmp_path / "s" / "1").write_text("")
    done = run(tmp_path, "-m", "seed=1,2,3", "output.dir=s", f"output.resume={resume}")
    assert done.returncode == 2
    assert re.fullmatch(r"Output folder '.*/s/1' can't be written to: .*\n", done.stderr)
    assert not (tmp_path / "s" / "2").exists()


def test_a_name_that_is_too_long_for_a_folder_is_one_line(tmp_path: Path) -> None:
    subdir = "hydra.sweep.subdir=${prompt}"
    done = run(tmp_path, "-m", f"prompt=short,{'x' * 300}", subdir, "output.dir=s")
    assert done.returncode == 2
    assert done.stderr.endswith(
        "can't be written to: File name too long. Choose another one with output.dir=...\n"
    )
    assert not (tmp_path / "s" / "short").exists()


def test_what_is_not_installed_is_said_with_the_remedy(tmp_path: Path) -> None:
    command = [sys.executable, "-S", str(REPO / "run.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "make run" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("default_signals")
def test_sigterm_while_a_job_writes_ends_the_sweep(tmp_path: Path) -> None:
    behaviour = "from pipelines.output_folder import OutputFolder; import os, signal; "
    behaviour += "sync = os.fsync; once = lambda _: setattr(os, 'fsync', sync) or "
    behaviour += "os.kill(os.getpid(), signal.SIGTERM); os.fsync = once; "
    behaviour += "OutputFolder(folder, None).write({'actions.npy': b'new'})"
    done = run(tmp_path, "-m", "seed=1,2", "output.dir=s", behaviour=behaviour)
    assert done.returncode == 143
    assert statuses(tmp_path / "s") == ["no result", "not started"]
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
