"""FLUX 3 Action as a policy of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from accel.errors import ConfigError, ObservationError, StrictModeError, UnequalBitsError
from pipelines.flux3_action.image_format import ImageFormat
from pipelines.flux3_action.observation import ALIASES, Observation, parse_observation
from pipelines.flux3_action.outputs import channels_of
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.request import ActionRequest
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.flux3_action.stages import TextEncoding
from pipelines.progress import NULL_PROGRESS, Progress
from stages.guidance import resolve_guidance
from tasks.serving.policy import Answer, Parameters, RegionCalls

T = TypeVar("T")

WARM_UP_RUNS = 3
"""Of each warm-up request: the first captures, the others replay."""

MAX_PROMPT = 2**16
"""Characters. All of a prompt are tokenized before it is cut, a second and 300 MB for each million."""

# Part of the answer's timing -> stages that make it up.
_PARTS = {
    "text_ms": ("text_encoding",),
    "observation_ms": ("vae", "observation_encoding"),
    "denoise_ms": ("denoising",),
    "postprocess_ms": ("action_decoding",),
}


@dataclass(frozen=True, kw_only=True)
class Flux3Defaults:
    """What the server decides for requests that leave it open, and what it lets them ask for.

    model_path: the weights' public name. max_steps: denoising steps of one request.
    """

    model_path: str
    settings: Flux3Settings
    seed: int | None
    images: ImageFormat
    max_steps: int


class Flux3Policy:
    """Serves one pipeline.

    warm_up_with: observations like those to come. strict: refuse to serve what is not accelerated as planned.
    before_warm_up: called first, in the thread that will run the pipeline.
    """

    def __init__(
        self,
        pipeline: Flux3ActionPipeline,
        *,
        defaults: Flux3Defaults,
        warm_up_with: Sequence[Observation],
        strict: bool,
        before_warm_up: Callable[[], object] = lambda: None,
        progress: Progress = NULL_PROGRESS,
    ) -> None:
        self._pipeline = pipeline
        self._defaults = defaults
        self._warm_up_with = warm_up_with
        self._strict = strict
        self._before_warm_up = before_warm_up
        self._progress = progress
        self._captions = next(stage for stage in pipeline.stages if isinstance(stage, TextEncoding)).cache
        self.metadata: Mapping[str, Any] = metadata(pipeline.config, defaults)

    def warm_up(self) -> None:
        """Capture the graphs of every warm-up request, and prove that replays give the same bits.

        Raises: UnequalBitsError; StrictModeError with accel.strict.
        """
        self._before_warm_up()
        requests = [
            self._pipeline.request(seen, seed=self._defaults.seed, settings=self._defaults.settings)
            for seen in self._warm_up_with
        ]
        results = self._pipeline.warm_up(requests * WARM_UP_RUNS, progress=self._progress)
        for index, result in enumerate(results):
            first = results[index % len(requests)]
            if not torch.equal(torch.from_numpy(result.actions), torch.from_numpy(first.actions)):
                raise UnequalBitsError("Warm-up requests with the same inputs gave different actions.")
        violations = self._pipeline.strict_violations()
        if self._strict and violations:
            raise StrictModeError.listing(violations)

    def prepare(self, observation: Mapping[str, Any], parameters: Parameters) -> ActionRequest:
        """Raises: ObservationError naming the camera or `state`; ConfigError naming the parameter."""
        defaults, own = self._defaults, self._defaults.settings
        if parameters.num_inference_steps is not None and parameters.num_inference_steps > defaults.max_steps:
            raise ConfigError(f"num_inference_steps: at most {defaults.max_steps} are taken by this server")
        settings = replace(
            own,
            steps=_given(parameters.num_inference_steps, own.steps),
            horizon=_given(parameters.action_horizon, own.horizon),
            guidance=_given(parameters.guidance_scale, own.guidance),
            guidance_action=_given(parameters.guidance_scale_action, own.guidance_action),
        )
        parsed = parse_observation(observation, self._pipeline.config, defaults.images)
        if len(parsed.prompt) > MAX_PROMPT:
            raise ObservationError(
                f"prompt: {len(parsed.prompt)} characters; at most {MAX_PROMPT} are taken by this server"
            )
        seed = _given(parameters.seed, defaults.seed)
        return self._pipeline.request(parsed, seed=seed, settings=settings)

    def infer(self, request: ActionRequest) -> Answer:
        misses = self._captions.misses
        result = self._pipeline.run(request)
        record = self._pipeline.record
        return Answer(
            actions=result.actions,
            steps=request.steps,
            caption_cached=self._captions.misses == misses if self._keeps_captions else None,
            stage_ms={
                part: sum(record.stage(s).latest_ms or 0.0 for s in names) for part, names in _PARTS.items()
            },
        )

    def region_calls(self) -> Iterable[RegionCalls]:
        for stage in list(self._pipeline.record.stages.values()):
            for outcome, count in list(stage.outcomes.items()):
                yield RegionCalls(stage.name, outcome.kind, outcome.reason or "", count)

    @property
    def _keeps_captions(self) -> bool:
        return self._defaults.settings.caption_cache_tokens > 0


def metadata(config: PolicyConfig, defaults: Flux3Defaults) -> dict[str, Any]:
    """What clients learn first (spec section 14.1), and `control`, by which they pace themselves.

    control: fps, the control rate in Hz; n_action_steps, actions to execute before the next observation;
    channels, what each column of the actions is.
    """
    settings = defaults.settings
    video, action = resolve_guidance(
        config.guidance_scale, config.guidance_scale_action, settings.guidance, settings.guidance_action
    )
    return {
        "object": "action.metadata",
        "model": "flux3-action",
        "model_path": defaults.model_path,
        "policy_family": "flux3_action",
        "input": {
            "image_keys": list(config.cameras),
            "camera_aliases": dict(ALIASES),
            "camera_layout": config.camera_layout,
            "state_dim": config.action_dim,
        },
        "output": {
            "action_type": "continuous",
            "action_horizon": settings.horizon or config.chunk_size,
            "action_dim": config.action_dim,
            "padded_action_dim": config.action_dim,
            "dtype": "float32",
        },
        "defaults": {
            "num_inference_steps": settings.steps or config.num_inference_steps,
            "guidance_scale": video,
            "guidance_scale_action": action,
            "sampler": settings.sampler or config.sampler,
            "variant": settings.variant,
        },
        "capabilities": {
            "exact_prefix_cache": settings.caption_cache_tokens > 0,
            "realtime_websocket": True,
            "openpi_websocket": True,
            "batch_inputs": False,
            "multiple_candidates": False,
        },
        "control": {
            "fps": config.fps,
            "n_action_steps": config.n_action_steps,
            "channels": [{"name": channel.name, "unit": channel.unit} for channel in channels_of(config)],
        },
    }


def _given(asked: T | None, own: T | None) -> T | None:
    """What the request asks for, or else the server's own."""
    return own if asked is None else asked
