"""What `run.py` does: check the command, then let Hydra run its job or jobs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from accel.errors import SamebitError
from pipelines.output_folder import OutputFolder
from pipelines.termination import Terminated, ending_cleanly
from tasks import config
from tasks.command_line import Plan, preflight
from tasks.result_file import RESULT_FILE
from tasks.standard_streams import keep_standard_streams
from tasks.sweep import run_isolated
from tasks.sweep_summary import summarise


def execute(run: Callable[[DictConfig], None]) -> int:
    """Carry out the command line of this process.

    run: calls `run_job`; Hydra takes its file for the place of the program.
    Returns: the exit code. Raises: SystemExit with another one, Terminated and KeyboardInterrupt.
    """
    keep_standard_streams()
    with ending_cleanly():
        try:
            plan = preflight(
                sys.argv[1:], config_dir=config.CONF, check=config.build, check_runnable=config.build_runnable
            )
            _prove_writable(plan)
            sys.argv[1:] = plan.argv
            return _start(plan, hydra.main(version_base="1.3", config_path="conf", config_name="config")(run))
        except SamebitError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except Terminated as signal:
            print(signal, file=sys.stderr)
            raise


def run_job(cfg: DictConfig) -> None:
    """One job, in the folder that Hydra made for it."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        run_isolated(lambda: _run_task(cfg, folder), folder)
        return
    try:
        _run_task(cfg, folder)
    except SamebitError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _run_task(cfg: DictConfig, folder: Path) -> None:
    chosen = config.resolve(cfg)
    task = importlib.import_module(f"tasks.{chosen.task.name}")  # loads torch, so not before the checks
    task.main(chosen, folder=folder)


def _prove_writable(plan: Plan) -> None:
    """Before Hydra writes to the folder of the command. Raises: OutputError."""
    if plan.sweep_folder:
        OutputFolder.claim(plan.sweep_folder, result_name=RESULT_FILE).close()
    elif plan.jobs:
        OutputFolder.claim(plan.jobs[0].folder, result_name=RESULT_FILE).close()


def _start(plan: Plan, start: Callable[[], None]) -> int:
    if plan.sweep_folder is None:
        start()
        return 0
    try:
        start()
    except (KeyboardInterrupt, Terminated):
        summarise(plan.jobs, plan.sweep_folder)
        raise
    return summarise(plan.jobs, plan.sweep_folder)
