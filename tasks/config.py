"""The whole configuration as one frozen dataclass. Free of torch, so that mistakes show at once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os.path import exists, expanduser
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from omegaconf import DictConfig

from accel.errors import ConfigError
from accel.policy import AccelPolicy
from pipelines.catalogue import MODELS, ModelSettings
from pipelines.flux3_action.settings import ObservationSource
from pipelines.number_types import Count
from pipelines.weights_config import WeightsConfig
from tasks.composition import Composer, plain_tree
from tasks.measurement_settings import BenchTask, ProfileTask, VerifyTask
from tasks.serving.settings import ClientTask, ServeTask
from tasks.short_forms import written_out
from tasks.typed import OTHER_NAMES, convert
from tasks.yaml_source import Source

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"

Device = Annotated[
    str,
    Meta(
        pattern=r"^(auto|cpu|cuda(:(0|[1-9][0-9]{0,2}))?)$",
        description="auto, cpu, cuda or cuda:N (text)",
        extra={OTHER_NAMES: {"gpu": "cuda", "nvidia": "cuda"}},
    ),
]
DtypeName = Annotated[
    Literal["auto", "bf16", "fp32"],
    Meta(extra={OTHER_NAMES: {"bfloat16": "bf16", "float32": "fp32", "fp16": None, "float16": None}}),
]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """One request, repeated. repeats: timed requests after the first, cold one.
    profile: count launches in an extra request; `auto` where there is CUDA.
    """

    name: Literal["run"]
    repeats: Count = 5
    profile: bool | Literal["auto"] = "auto"


TaskSettings: TypeAlias = RunTask | VerifyTask | BenchTask | ProfileTask | ServeTask | ClientTask


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """kind: `rich` tables, `plain` text, or `quiet`: errors and the result's path only."""

    kind: Literal["rich", "plain", "quiet"] = "rich"


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """dir: folder of the run (of the sweep with -m); `None` is a new dated one.
    resume: go on with the sweep in `dir`; jobs that finished are not run again.
    """

    dir: str | None = None
    resume: bool = False


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a command decides; nothing below the entry point reads any other setting.

    size: released architecture (`full`) or small widths (`tiny`); `auto` is full with CUDA or
    given weights. device: `auto` is cuda where there is one. dtype: `auto` is bf16 on cuda,
    fp32 on cpu. seed: of the noise; `None` is the model's own. observation: for models that
    take one. extras: free keys of the user, which Samebit stores and never reads.
    """

    model: ModelSettings
    accel: AccelPolicy
    task: TaskSettings
    weights: WeightsConfig
    logger: LoggerConfig
    size: Literal["auto", "tiny", "full"] = "auto"
    device: Device = "auto"
    dtype: DtypeName = "auto"
    seed: Seed | None = None
    prompt: str | None = None
    observation: ObservationSource | None = None
    output: OutputConfig = field(default_factory=OutputConfig)
    extras: dict[str, Any] = field(default_factory=dict)


def build(tree: Mapping[str, Any], source: Source | None = None) -> RunConfig:
    """Check a composed configuration and make it a `RunConfig`.

    tree: plain dicts, lists and scalars. source: how each value was written, for messages.
    Raises: ConfigError.
    """
    _refuse_unread_observation(tree)
    config = convert(dict(tree), RunConfig, source=source)
    name, model = config.model.name, MODELS[config.model.name]
    config.accel.check(stages=model.stages, sites=model.sites, savings=model.savings, loops=model.loops)
    config.weights.check(size=config.size)
    _refuse_like_arms(config)
    if model.observes and config.observation is None:
        raise ConfigError(f"observation: model={name} needs one, e.g. observation.episode=data/panda_lift")
    return _located(config)


def resolve(cfg: DictConfig) -> RunConfig:
    """Hydra's composed configuration as a checked `RunConfig` that can be run. Raises: ConfigError."""
    return build(plain_tree(cfg))


def compose(*overrides: str) -> RunConfig:
    """The configuration of `python run.py OVERRIDES...`, for use as a library.

    Example: compose("accel=eager", "weights=owner/name@revision").
    Raises: ConfigError for what `run.py` refuses.
    """
    composed = Composer(CONF).compose(written_out(overrides))
    return build(composed.tree, composed.source)


def config_hash(config: RunConfig) -> str:
    """12 hex digits that are equal for equal settings, wherever and however results are shown and written."""
    settings = replace(config, output=OutputConfig(), logger=LoggerConfig())
    text = msgspec.json.encode(settings, order="sorted")
    # The episode that comes with Samebit is the same one from any working directory.
    return hashlib.sha256(text.replace(f'"{ROOT}/'.encode(), b'"')).hexdigest()[:12]


def _refuse_unread_observation(tree: Mapping[str, Any]) -> None:
    """Comes first: what would be wrong with an observation that nothing reads is beside the point."""
    match tree:
        case {"model": {"name": str(name)}, "observation": given} if given is not None:
            if name in MODELS and not MODELS[name].observes:
                raise ConfigError(f"observation: model={name} takes none; leave it out.")


def _refuse_like_arms(config: RunConfig) -> None:
    """Raises: ConfigError where `task=bench` would time the same policy twice."""
    task, accel = config.task, config.accel
    if not isinstance(task, BenchTask) or task.against != accel.name:
        return
    if accel == compose(f"accel={task.against}").accel:
        raise ConfigError(
            f"task.against={task.against} and accel={accel.name} are the same. Choose another accel, or "
            "another task.against; every job of task=bench times its own reference beside accel."
        )


def _located(config: RunConfig) -> RunConfig:
    """The same with `~` written out in paths, and with the shipped episode found from anywhere."""
    seen = config.observation
    if seen is not None:
        images = seen.images and {camera: expanduser(path) for camera, path in seen.images.items()}
        episode = seen.episode and _shipped(expanduser(seen.episode))
        seen = replace(seen, episode=episode, npz=seen.npz and expanduser(seen.npz), images=images)
    accel, weights, output = config.accel, config.weights, config.output
    return replace(
        config,
        observation=seen,
        task=_with_home_written_out(config.task),
        accel=replace(accel, manifest=accel.manifest and expanduser(accel.manifest)),
        weights=replace(weights, path=weights.path and expanduser(weights.path)),
        output=replace(output, dir=output.dir and expanduser(output.dir)),
    )


def _with_home_written_out(task: TaskSettings) -> TaskSettings:
    names = ("token_file", "tls_certificate", "tls_key")
    given = {name: getattr(task, name) for name in names if getattr(task, name, None) is not None}
    return replace(task, **{name: expanduser(path) for name, path in given.items()})


def _shipped(path: str) -> str:
    """A relative path that only the folder of Samebit has, as an absolute one."""
    return str(ROOT / path) if not exists(path) and exists(ROOT / path) else path
