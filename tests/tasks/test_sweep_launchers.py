"""Sweeps in processes that a launcher starts, and those whose jobs a sweeper chooses, of a stand-in task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from accel.errors import ConfigError
from tasks.composition import Composer
from tasks.config import CONF

HERE = Path(__file__).parent

# A program of its own beside a link to `conf`, as `run` carries the stand-in task into other processes.
PROGRAM = """
import sys

def run(cfg):
    import os, signal, sys, time, types
    from sweep_examples import example_result
    from tasks.command import run_job
    from tasks.config import config_hash
    from tasks.result_file import encode_result

    def main(config, *, folder):
        accel, latency = config.accel.name, float(config.accel.max_entries)
        {behaviour}
        result = example_result(accel=accel, walls_ms=(latency, latency), config_hash=config_hash(config))
        (folder / "result.json").write_bytes(encode_result(result))

    sys.modules["tasks.run"] = types.ModuleType("tasks.run")
    sys.modules["tasks.run"].main = main
    return run_job(cfg)

if __name__ == "__main__":
    from tasks.command import execute

    sys.exit(execute(run))
"""

# Jobs that ought to run side by side wait for each other, so that they do.
MEET = "until = time.time() + 60\n        "
MEET += "while len(list(folder.parent.glob('*/job.json'))) < 2 and time.time() < until: time.sleep(0.01)"

OTHER_IS_DONE = "other = folder.parent / '0' / 'job.json'\n            "
OTHER_IS_DONE += "while not other.exists() or 'null' in other.read_text(): time.sleep(0.01)\n            "


def run(folder: Path, *argv: str, behaviour: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM.format(behaviour=behaviour))
    (folder / "conf").symlink_to(CONF)
    return subprocess.run(
        [sys.executable, "program.py", "-m", *argv, f"output.dir={folder / 's'}"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{CONF.parent}{os.pathsep}{HERE}"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def compared(folder: Path) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = json.loads((folder / "s" / "comparison.json").read_text())["jobs"]
    return jobs


@pytest.mark.parametrize(
    ("launcher", "plugin", "settings"),
    [
        ("joblib", "hydra_joblib_launcher", ("hydra.launcher.n_jobs=2",)),
        ("submitit_local", "hydra_submitit_launcher", ("hydra.launcher.timeout_min=3",)),
        (
            "ray",
            "hydra_ray_launcher",
            ("+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.address=local"),
        ),
    ],
)
def test_jobs_in_other_processes_are_compared(
    launcher: str, plugin: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    if find_spec(f"hydra_plugins.{plugin}") is None:
        pytest.skip(f"hydra/launcher={launcher} is not installed: pip install {plugin.replace('_', '-')}")
    names = "hydra.sweep.subdir=${hydra.job.override_dirname}"
    done = run(
        tmp_path,
        *(f"hydra/launcher={launcher}", *settings, names, "accel=eager,graph", "accel.max_entries=2"),
        behaviour=f"{MEET}\n        if accel == 'graph': raise ValueError('no luck')",
    )
    eager, graph = compared(tmp_path)
    assert done.returncode == 1, done.stderr
    assert (eager["status"], eager["contended_with"]) == ("ok", [1])
    assert (graph["status"], graph["error"]) == ("failed", "ValueError: no luck")
    assert graph["contended_with"] == [0]
    assert eager["begin"] < graph["end"]
    assert "contended: ran beside job 1" in done.stdout


def test_a_launcher_that_loses_its_processes_leaves_a_comparison(tmp_path: Path) -> None:
    pytest.importorskip("joblib", reason="hydra/launcher=joblib is not installed")
    done = run(
        tmp_path,
        *("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "accel=eager,graph"),
        behaviour=f"if accel == 'graph':\n            {OTHER_IS_DONE}os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert done.returncode == 1
    eager, graph = compared(tmp_path)
    assert (eager["status"], graph["status"]) == ("ok", "no result")
    assert graph["begin"] is not None
    assert graph["end"] is None


def test_a_launcher_that_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Composer, "_options", lambda self, group: ["basic"])
    with pytest.raises(ConfigError, match="needs a package that is missing: pip install hydra-ray-launcher"):
        Composer(CONF).compose(["hydra/launcher=ray"])


def test_optuna_minimises_latency_and_no_failed_job_looks_fast(tmp_path: Path) -> None:
    if find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        pytest.skip("hydra/sweeper=optuna is not installed: pip install hydra-optuna-sweeper")
    done = run(
        tmp_path,
        *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.sampler.seed=1"),
        *("hydra.sweeper.n_jobs=3", "accel.max_entries=choice(1,2,4)"),
        behaviour="if config.accel.max_entries == 1: raise ValueError('no luck')",
    )
    assert done.returncode == 1, done.stderr  # for the failed jobs
    rows = compared(tmp_path)
    tried = {row["overrides"][0]: row["status"] for row in rows}
    assert [row["job"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert tried == {
        "accel.max_entries=1": "failed",
        "accel.max_entries=2": "ok",
        "accel.max_entries=4": "ok",
    }
    best = yaml.safe_load((tmp_path / "s" / "optimization_results.yaml").read_text())
    assert (best["best_params"], best["best_value"]) == ({"accel.max_entries": 2}, 2.0)


def test_optuna_is_refused_before_the_first_job_where_it_makes_no_sense(tmp_path: Path) -> None:
    if find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        pytest.skip("hydra/sweeper=optuna is not installed: pip install hydra-optuna-sweeper")
    wrong = run(tmp_path, "hydra/sweeper=optuna", "accel.max_entries=choice(1,two)", behaviour="pass")
    assert wrong.returncode == 2
    assert "accel.max_entries" in wrong.stderr
    (tmp_path / "conf").unlink()
    command = ("hydra/sweeper=optuna", "accel.max_entries=choice(1,2)", "output.resume=true")
    resumed = run(tmp_path, *command, behaviour="pass")
    assert resumed.returncode == 2
    assert "jobs that are known beforehand" in resumed.stderr
    (tmp_path / "conf").unlink()
    command = ("hydra/sweeper=optuna", "accel.max_entries=choice(1,2)", "task=client")
    without_latency = run(tmp_path, *command, behaviour="pass")
    assert without_latency.returncode == 2
    assert "latency that task=run measures, not client" in without_latency.stderr
    assert not (tmp_path / "s").exists()
