"""The command: check it, let Hydra compose it, hand each job to its task.

Exit codes: 0 fine, 1 a fault or a failed job of a sweep, 2 a mistake in the configuration or an
input, 3 `accel.strict` found something eager, 130 Ctrl-C.
"""

import importlib
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from accel.errors import SamebitError
from tasks import config, sweep
from tasks.command_line import preflight


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> None:
    """One job, in the folder that Hydra made for it."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        sweep.run_isolated(lambda: run_task(cfg, folder), folder)
        return
    try:
        run_task(cfg, folder)
    except SamebitError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def run_task(cfg: DictConfig, folder: Path) -> None:
    chosen = config.resolve(cfg)
    task = importlib.import_module(f"tasks.{chosen.task.name}")  # loads torch, so not before the checks
    task.main(chosen, folder=folder)


def main() -> int:
    try:
        plan = preflight(
            sys.argv[1:], config_dir=config.CONF, check=config.build, check_runnable=config.build_runnable
        )
    except SamebitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sys.argv[1:] = plan.argv
    try:
        run()
    except KeyboardInterrupt:
        code = 130
    else:
        code = 0
    failed = sweep.summarise(plan.jobs, plan.sweep_folder) if plan.sweep_folder else 0
    return code or failed


if __name__ == "__main__":
    sys.exit(main())
