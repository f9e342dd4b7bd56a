"""What `run.py` does: check the command, then let Hydra run its job or jobs."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from accel.errors import ConfigError, OutputError, SamebitError
from pipelines.output_folder import OutputFolder, prove_writable
from pipelines.termination import Terminated, ending_cleanly
from tasks import config
from tasks.command_line import Plan, preflight
from tasks.heap import keep_freed_memory
from tasks.job_record import JOB_FILE, read_record, recorded
from tasks.result_file import RESULT_FILE
from tasks.standard_streams import keep_standard_streams
from tasks.sweep import (
    REPORT_FILES,
    finished_report,
    latency_ms,
    register_resolvers,
    run_isolated,
    set_unfinished_aside,
)

log = logging.getLogger(__name__)

# Here and not in `execute`: processes that a launcher starts get no further than importing this.
register_resolvers()


class PortableJob:
    """`run` for Hydra, in whatever process a launcher chooses: sending it there names this module."""

    def __init__(self, run: Callable[[DictConfig], float | None]) -> None:
        self.__wrapped__ = run  # by which Hydra finds the place of the program

    def __call__(self, cfg: DictConfig) -> float | None:
        return self.__wrapped__(cfg)


def execute(run: Callable[[DictConfig], float | None]) -> int:
    """Carry out the command line of this process.

    run: returns what `run_job` does; Hydra takes its file for the place of the program.
    Returns: the exit code. Raises: SystemExit with another one, Terminated and KeyboardInterrupt.
    """
    keep_standard_streams()
    with ending_cleanly():
        try:
            plan = preflight(sys.argv[1:], config_dir=config.CONF, check=config.build)
            sys.argv[1:] = plan.argv
            start = hydra.main(version_base="1.3", config_path="conf", config_name="config")(PortableJob(run))
            return _sweep(plan, plan.sweep_folder, start) if plan.sweep_folder else _run(plan, start)
        except SamebitError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except Terminated as signal:
            print(signal, file=sys.stderr)
            raise


def run_job(cfg: DictConfig) -> float | None:
    """One job, in the folder that Hydra made for it.

    Returns: for a job of a sweep, what `tasks.sweep.latency_ms` says of it.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        _run_job_of_sweep(cfg, folder)
        return latency_ms(folder)
    try:
        _run_task(cfg, folder)
    except SamebitError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    return None


def _run_job_of_sweep(cfg: DictConfig, folder: Path) -> None:
    if cfg.output.resume:
        if finished_report(folder, cfg.task.name) is not None:
            return  # its settings were compared before the sweep started
        set_unfinished_aside(folder, cfg.task.name)
    job = HydraConfig.get()
    try:
        with recorded(
            folder,
            number=job.job.num,
            overrides=[override.lstrip("+") for override in job.overrides.task],
            model=cfg.model.name,
            accel=cfg.accel.name,
            task=cfg.task.name,
            device=cfg.device,
        ):
            run_isolated(lambda: _run_task(cfg, folder), folder)
    except (OutputError, OSError) as error:  # a full disk, where not even the error can be written
        log.error("Job in %s can't say what became of it: %s", folder, error)


def _run_task(cfg: DictConfig, folder: Path) -> None:
    keep_freed_memory()
    chosen = config.resolve(cfg)
    task = importlib.import_module(f"tasks.{chosen.task.name}")  # loads torch, so not before the checks
    task.main(chosen, folder=folder)


def _run(plan: Plan, start: Callable[[], None]) -> int:
    # One job, or none with --help; its folder is proven before Hydra writes to it.
    for job, settings in zip(plan.jobs, plan.configs, strict=True):
        result_name = REPORT_FILES.get(settings.task.name, RESULT_FILE)
        OutputFolder.claim(job.folder, result_name=result_name).close()
    start()
    return 0


def _sweep(plan: Plan, folder: Path, start: Callable[[], None]) -> int:
    _refuse_without_latency(plan)
    _refuse_without_report(plan)
    with OutputFolder.claim(folder, result_name=RESULT_FILE):
        _refuse_mixing(plan, folder)
        for job in plan.jobs:
            # Hydra writes there before anything else, and what it then raises ends the whole sweep.
            if not _is_missing(job.folder):
                prove_writable(job.folder)
        try:
            start()
        except BaseException:  # Ctrl-C, a signal, or a launcher that lost its processes
            _compare(plan, folder)
            raise
        return _compare(plan, folder)


def _is_missing(folder: Path) -> bool:
    """Whether there is no such folder, but could be: names may be too long, for one."""
    try:
        folder.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _compare(plan: Plan, folder: Path) -> int:
    from tasks.comparison import compare, recorded_jobs  # what only sweeps need is loaded after them

    jobs = recorded_jobs(folder) if plan.sampled else plan.jobs
    return compare(jobs, folder, logger=plan.configs[0].logger.kind)


def _refuse_mixing(plan: Plan, folder: Path) -> None:
    """A folder holds one sweep. Raises: ConfigError."""
    resumes = plan.configs[0].output.resume
    if not resumes and any(folder.rglob(JOB_FILE)):
        raise ConfigError(
            f"'{folder}' already holds jobs of a sweep. Choose another output.dir, or go on with that sweep: "
            "its command with output.resume=true"
        )
    if resumes and not any(folder.rglob(JOB_FILE)):
        raise ConfigError(f"'{folder}' holds no sweep to go on with. Leave output.resume out to start one.")
    for job, settings in zip(plan.jobs, plan.configs, strict=True):
        record = read_record(job.folder)
        if record is not None and record.task != settings.task.name:
            raise ConfigError(
                f"'{job.folder}' holds a job of task={record.task}, and a sweep of task={settings.task.name} "
                "needs a folder of its own. Choose another output.dir."
            )
        report = finished_report(job.folder, settings.task.name)
        if report is not None and report.config_hash != config.config_hash(settings):
            raise ConfigError(
                f"'{job.folder}' holds the result of other settings ({report.config_hash}) than job "
                f"{job.number} has now. Repeat the command of that sweep, or choose another output.dir."
            )


def _refuse_without_report(plan: Plan) -> None:
    """Raises: ConfigError where a job would leave nothing to compare it by."""
    silent = {settings.task.name for settings in plan.configs} - REPORT_FILES.keys()
    if silent:
        raise ConfigError(f"-m compares jobs, and task={', '.join(silent)} leaves no result. Leave -m out.")


def _refuse_without_latency(plan: Plan) -> None:
    """Raises: ConfigError where a sweeper would get nothing to go by."""
    tasks = {settings.task.name for settings in plan.configs}
    if plan.sampled and tasks != {"run"}:
        raise ConfigError(f"This sweeper goes by the latency that task=run measures, not {', '.join(tasks)}.")
