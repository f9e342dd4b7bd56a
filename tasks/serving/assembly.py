"""From a checked configuration to a service, whoever listens for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accel.errors import ConfigError
from pipelines.flux3_action.observation import parse_observation
from pipelines.flux3_action.observation_files import load_observation
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.weights_config import WeightsConfig
from tasks.config import RunConfig
from tasks.manifest_file import ManifestFile
from tasks.serving.flux3 import Flux3Defaults, Flux3Policy
from tasks.serving.policy import Policy
from tasks.serving.service import Service
from tasks.serving.settings import ServeTask


def serve_task(config: RunConfig) -> ServeTask:
    """What the user set for the server. Raises: ConfigError if the model is no robot policy."""
    assert isinstance(config.task, ServeTask)
    if not isinstance(config.model, Flux3Settings):
        raise ConfigError(
            f"task=serve needs a robot policy, model=flux3_action; model={config.model.name} is none."
        )
    return config.task


def make_policy(
    config: RunConfig,
    pipeline: Flux3ActionPipeline,
    *,
    manifest: ManifestFile | None,
    progress: Progress = NULL_PROGRESS,
) -> Flux3Policy:
    """The pipeline as a policy that warms up with the manifest, the observation and the prompts configured.

    Raises: ObservationError.
    """
    task = serve_task(config)
    settings, source = config.model, config.observation
    assert isinstance(settings, Flux3Settings)
    assert source is not None  # a model that observes has one
    raw = load_observation(source)
    observation = parse_observation(raw, pipeline.config, source.image_format())
    own = observation.prompt if config.prompt is None else config.prompt
    prompts = [own, *task.warm_up_prompts]

    def capture() -> None:
        if manifest is not None:
            manifest.capture(pipeline, settings)

    return Flux3Policy(
        pipeline,
        defaults=Flux3Defaults(
            model_path=_public_name(config.weights),
            settings=settings,
            seed=config.seed,
            images=task.images,
            max_steps=task.max_steps,
        ),
        warm_up_with=[replace(observation, prompt=prompt) for prompt in prompts],
        strict=config.accel.strict,
        before_warm_up=capture,
        progress=progress,
    )


def make_service(policy: Policy, task: ServeTask) -> Service:
    """The service that `task` describes."""
    return Service(
        policy,
        queue_size=task.queue_size,
        latest_wins=task.latest_wins,
        deadline_ms=task.deadline_ms,
        slow_ms=task.slow_ms,
    )


def _public_name(weights: WeightsConfig) -> str:
    """What clients may know of where the weights come from: no folders of this machine."""
    if weights.kind == "hub":
        assert weights.repo is not None
        return weights.repo
    if weights.kind == "local":
        assert weights.path is not None
        return Path(weights.path).resolve().name
    return "synthetic"
