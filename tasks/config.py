"""The whole configuration as one frozen dataclass. Free of torch, so that mistakes show at once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import exists, expanduser
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from omegaconf import DictConfig

from accel.errors import ConfigError
from accel.policy import AccelPolicy
from pipelines.catalogue import MODELS, Flux2Settings, Ltx2Settings, require_available
from pipelines.flux3_action.settings import Flux3Settings, ObservationSource
from pipelines.number_types import Count
from pipelines.weights_config import WeightsConfig
from tasks.composition import Composer, plain_tree
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
WarmUps = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """One request, repeated. repeats: timed requests after the first, cold one.
    profile: count launches in an extra request; `auto` where there is CUDA.
    """

    name: Literal["run"]
    repeats: Count = 5
    profile: bool | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class VerifyTask:
    """Prove that acceleration changes no bit. requests: how many to compare with eager ones."""

    name: Literal["verify"]
    requests: Count = 3


@dataclass(frozen=True, kw_only=True)
class BenchTask:
    """Time `accel` against eager. warmup, calls: untimed and timed requests of each arm."""

    name: Literal["bench"]
    warmup: WarmUps = 10
    calls: Count = 50


@dataclass(frozen=True, kw_only=True)
class ServeTask:
    """Answer observations over the network. host, port: where to listen."""

    name: Literal["serve"]
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000


TaskSettings: TypeAlias = RunTask | VerifyTask | BenchTask | ServeTask
ModelSettings: TypeAlias = Flux3Settings | Flux2Settings | Ltx2Settings

# What this version carries out; the other choices compose and are refused before any work.
RUNNING_TASKS = ("run",)
RUNNING_ACCEL = ("eager", "graph", "segmented", "fused", "graph+fused")


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """kind: `rich` tables, `plain` text, or `quiet`: errors and the result's path only."""

    kind: Literal["rich", "plain", "quiet"] = "rich"


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """dir: folder of the run (of the sweep with -m); `None` is a new dated one."""

    dir: str | None = None


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
    config = convert(dict(tree), RunConfig, source=source)
    name, model = config.model.name, MODELS[config.model.name]
    config.accel.check(stages=model.stages, sites=model.sites)
    config.weights.check()
    if model.observes and config.observation is None:
        raise ConfigError(f"observation: model={name} needs one, e.g. observation.episode=data/panda_lift")
    if not model.observes and config.observation is not None:
        raise ConfigError(f"observation: model={name} takes none; leave it out.")
    return _located(config)


def build_runnable(tree: Mapping[str, Any], source: Source | None = None) -> RunConfig:
    """`build`, and refuse what composes but is not carried out by this version. Raises: ConfigError."""
    config = build(tree, source)
    require_available(config.model.name)
    _refuse_unavailable("task", config.task.name, RUNNING_TASKS)
    _refuse_unavailable("accel", config.accel.name, RUNNING_ACCEL)
    return config


def resolve(cfg: DictConfig) -> RunConfig:
    """Hydra's composed configuration as a checked `RunConfig` that can be run. Raises: ConfigError."""
    return build_runnable(plain_tree(cfg))


def compose(*overrides: str) -> RunConfig:
    """The configuration of `python run.py OVERRIDES...`, for use as a library.

    Example: compose("accel=eager", "size=tiny"). Raises: ConfigError for what `run.py` refuses.
    """
    composed = Composer(CONF).compose(overrides)
    return build_runnable(composed.tree, composed.source)


def config_hash(config: RunConfig) -> str:
    """12 hex digits that are equal for equal settings, wherever and however results are shown and written."""
    settings = replace(config, output=OutputConfig(), logger=LoggerConfig())
    text = msgspec.json.encode(settings, order="sorted")
    # The episode that comes with Samebit is the same one from any working directory.
    return hashlib.sha256(text.replace(f'"{ROOT}/'.encode(), b'"')).hexdigest()[:12]


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
        accel=replace(accel, manifest=accel.manifest and expanduser(accel.manifest)),
        weights=replace(weights, path=weights.path and expanduser(weights.path)),
        output=replace(output, dir=output.dir and expanduser(output.dir)),
    )


def _shipped(path: str) -> str:
    """A relative path that only the folder of Samebit has, as an absolute one."""
    return str(ROOT / path) if not exists(path) and exists(ROOT / path) else path


def _refuse_unavailable(key: str, choice: str, running: Sequence[str]) -> None:
    if choice not in running:
        raise ConfigError(
            f"{key}={choice} is not available in this version. Available: {', '.join(running)}."
        )
