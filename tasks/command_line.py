"""Check a command line before anything starts: every job composed, every value converted.

Mistakes cost a fraction of a second and read as one or two lines. What passes goes to Hydra
unchanged, but for short forms that are written out and output folders that are fixed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from accel.errors import ConfigError
from tasks.composition import Composed, Composer, quoted
from tasks.job_record import JOB_FILE
from tasks.result_file import RESULT_FILE
from tasks.short_forms import written_out
from tasks.sweep import Job, register_resolvers
from tasks.yaml_source import Source

Check = Callable[[Mapping[str, Any], Source], Any]


@dataclass(frozen=True)
class Plan:
    """What a command will do.

    argv: arguments for Hydra. jobs: one for a plain run; none for --help and the like.
    configs: what the check made of each job. sweep_folder: set for sweeps.
    sampled: a sweeper chooses and numbers its jobs itself while it runs; these have each of its values once.
    """

    argv: tuple[str, ...]
    jobs: tuple[Job, ...] = ()
    configs: tuple[Any, ...] = ()
    sweep_folder: Path | None = None
    sampled: bool = False


def preflight(
    argv: Sequence[str],
    *,
    config_dir: Path,
    config_name: str = "config",
    check: Check,
) -> Plan:
    """Compose and check every job of a command line; nothing is written.

    check: makes the typed configuration of a job, or raises ConfigError.
    Raises: ConfigError; SystemExit after --version.
    """
    if "--version" in argv:
        print(f"Samebit {_version()}")
        raise SystemExit(0)
    register_resolvers()
    args = _parse(argv)
    if args.help or args.hydra_help or args.shell_completion:
        return Plan(tuple(argv))
    shows_only = args.cfg is not None or args.info is not None
    if shows_only and args.multirun:
        raise ConfigError("--cfg and --info show one job. Leave -m out.")
    composer = Composer(
        config_dir.parent / args.config_path if args.config_path else config_dir,
        config_name=args.config_name or config_name,
        extra_dir=Path(args.config_dir) if args.config_dir else None,
    )
    texts = [_safe_folder(text) for text in written_out(args.overrides)]
    if args.multirun:
        texts = _settled(composer, texts)
    sampled = args.multirun and _is_sampled(composer, texts)
    split = _split(composer, texts, sweep=args.multirun, sampled=sampled)
    jobs = [composer.compose(job) for job in split]
    configs = tuple(check(job.tree, job.source) for job in jobs)
    flags = _without(argv, args.overrides)
    overrides = _for_hydra(composer, texts, jobs)
    if shows_only:
        return Plan((*flags, *overrides))
    _refuse_hidden_sweep(jobs, sweep=args.multirun)
    root, folders = _folders(jobs, sweep=args.multirun)
    resumes = _resumes(jobs, sweep=args.multirun, sampled=sampled)
    _refuse_clashes(folders, may_hold_results=resumes)
    key = "hydra.sweep.dir" if args.multirun else "hydra.run.dir"
    return Plan(
        (*flags, *overrides, f"{key}={quoted(str(root))}"),
        tuple(Job(_own(split[n]), folder, n) for n, folder in enumerate(folders)),
        configs,
        root if args.multirun else None,
        sampled,
    )


def _version() -> str:
    try:
        return metadata.version("samebit")
    except metadata.PackageNotFoundError:
        return "of this folder, which is not installed"


def _parse(argv: Sequence[str]) -> Any:
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(list(argv))  # flags may stand anywhere
    modes = {text.split("=")[1].upper() for text in args.overrides if text.startswith("hydra.mode=")}
    args.multirun = args.multirun or "MULTIRUN" in modes
    return args


def _refuse_flag(message: str) -> Any:
    raise ConfigError(f"{message}. See python run.py --help")


def _safe_folder(text: str) -> str:
    """An override, with the overrides of a job in a folder's name made one legal name."""
    key, _, value = text.partition("=")
    name = "${hydra.job.override_dirname}"
    if key not in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir") or name not in value:
        return text
    safe = value.strip("'\"").replace(name, f"${{folder_name:{name}}}")
    return f"{key}={quoted(safe)}"


def _is_sampled(composer: Composer, texts: list[str]) -> bool:
    fixed = [text for text in texts if not composer.parse([text])[0].is_sweep_override()]
    target: str = composer.compose(fixed).cfg.hydra.sweeper._target_
    return not target.endswith(f".{BasicSweeper.__name__}")


def _settled(composer: Composer, texts: list[str]) -> list[str]:
    """The overrides of a sweep, each with a value at least, whose order Hydra will find again."""
    try:
        return [_in_one_order(override) for override in composer.parse(texts)]
    except (HydraException, ValueError) as error:  # of intervals, and of ranges whose steps are 0
        raise ConfigError(f"this sweep can't be listed: {error}") from error


def _in_one_order(override: Override) -> str:
    text = str(override.input_line)
    if not override.is_sweep_override():
        return text
    values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"'{text}' names no value, so that the sweep has no job.")
    # Hydra would shuffle once more, and number the jobs otherwise.
    shuffled = getattr(override.value(), "shuffle", False)
    return f"{override.get_key_element()}={','.join(values)}" if shuffled else text


def _split(composer: Composer, texts: list[str], *, sweep: bool, sampled: bool) -> list[list[str]]:
    """The overrides of each job, in the order in which Hydra numbers them.

    sampled: of as many jobs as it takes to have each value once, since combinations may be too many.
    """
    if not sweep:
        return [texts]
    if not sampled:
        return _listed(composer.parse(texts))
    values = [_listed([override]) for override in composer.parse(texts)]
    longest = max(map(len, values), default=1)
    return [[value[min(n, len(value) - 1)][0] for value in values] for n in range(longest)]


def _listed(overrides: list[Override]) -> list[list[str]]:
    return list(itertools.chain.from_iterable(BasicSweeper.split_arguments(overrides, None)))


def _for_hydra(composer: Composer, texts: list[str], jobs: list[Composed]) -> list[str]:
    """The overrides as typed, with the plus signs and deletions that Hydra needs."""
    # Sorted, so that a deletion ("~key") in one job comes last and is the one that is kept.
    texts_of_jobs = sorted(text for job in jobs for text in job.overrides)
    composed = {_bare_key(text): text.partition("=")[0] for text in texts_of_jobs}
    overrides = composer.parse(texts)
    composed |= {key: f"++{key}" for key in composer.unreached(overrides)}
    return [_with_key(override, composed) for override in overrides]


def _with_key(override: Override, composed: Mapping[str, str]) -> str:
    text = str(override.input_line)
    key = composed.get(_bare_key(text), text)
    if not key.startswith("~"):
        return f"{key}={text.partition('=')[2]}"
    if override.is_sweep_override():
        raise ConfigError(f"'{text}': null can't be one of several options. Run that job by itself.")
    return key


def _own(texts: Sequence[str]) -> tuple[str, ...]:
    """A job's overrides without plus signs and without those of Hydra's own node."""
    return tuple(text.lstrip("+") for text in texts if not _bare_key(text).startswith("hydra."))


def _bare_key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def _without(argv: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The arguments that are flags of Hydra or their values."""
    left = list(argv)
    for override in overrides:
        left.remove(override)
    return left


def _refuse_hidden_sweep(jobs: Sequence[Composed], *, sweep: bool) -> None:
    """All jobs must be known beforehand, so sweeps stand on the command line."""
    for job in jobs:
        hydra = job.cfg.hydra
        if hydra.sweeper.get("params") or (str(hydra.mode).endswith("MULTIRUN") and not sweep):
            raise ConfigError(
                "hydra.sweeper.params, hydra.mode: list a sweep on the command line, e.g. -m seed=1,2"
            )


def _folders(jobs: Sequence[Composed], *, sweep: bool) -> tuple[Path, list[Path]]:
    """The folder of the command and those of its jobs, settled before anything starts."""
    try:
        given = {OmegaConf.select(job.cfg, "output.dir") for job in jobs}
        if len(given) > 1:
            raise ConfigError("output.dir is the folder of the whole sweep and can't differ between jobs.")
        chosen = given.pop() or jobs[0].cfg.hydra[("sweep" if sweep else "run")].dir
        root = Path(os.path.expanduser(chosen)).absolute()
        return root, [root / _subfolder(job, number) for number, job in enumerate(jobs)] if sweep else [root]
    except OmegaConfBaseException as error:
        raise ConfigError(f"output folder: {str(error).splitlines()[0]}") from error


def _subfolder(job: Composed, number: int) -> str:
    with open_dict(job.cfg):
        job.cfg.hydra.job.num = number
        job.cfg.hydra.job.id = str(number)
    return str(job.cfg.hydra.sweep.subdir)


def _resumes(jobs: Sequence[Composed], *, sweep: bool, sampled: bool) -> bool:
    given = {bool(OmegaConf.select(job.cfg, "output.resume")) for job in jobs}
    if len(given) > 1:
        raise ConfigError("output.resume is for the whole sweep and can't differ between jobs.")
    if not given.pop():
        return False
    if not sweep:
        raise ConfigError("output.resume=true goes on with a sweep. Repeat the sweep's command, with -m.")
    if sampled:
        raise ConfigError(
            "output.resume=true needs jobs that are known beforehand, and this sweeper chooses them as it "
            "goes. Start it again in a new output.dir."
        )
    return True


def _refuse_clashes(folders: Sequence[Path], *, may_hold_results: bool) -> None:
    seen: dict[Path, int] = {}
    for number, folder in enumerate(folders):
        if folder in seen:
            raise ConfigError(
                f"jobs {seen[folder]} and {number} would both write to '{folder}'. "
                "Let hydra.sweep.subdir differ, e.g. ${hydra.job.num}"
            )
        seen[folder] = number
        # False also for a path that can't be
        if not may_hold_results and os.path.exists(folder / RESULT_FILE):
            held = (
                f"'{folder}' already holds a {RESULT_FILE}, which is never replaced. Set another output.dir"
            )
            resume = ", or go on with that sweep: its command with output.resume=true"
            raise ConfigError(held + (resume if os.path.exists(folder / JOB_FILE) else ""))
