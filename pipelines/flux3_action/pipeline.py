"""FLUX 3 Action from components to actions."""

from __future__ import annotations

from typing import Protocol

from accel.errors import ConfigError, ObservationError
from accel.policy import AccelPolicy
from pipelines.flux3_action.images import ImageFormat
from pipelines.flux3_action.observation import Observation, RawObservation, parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame, load_image_files, load_npz
from pipelines.flux3_action.outputs import Origin, action_files, channels_of
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.request import ActionRequest, ActionResult
from pipelines.flux3_action.settings import Flux3Settings, ObservationSource
from pipelines.flux3_action.stages import ActionDecoding, Denoising, ObservationEncoding, TextEncoding, Vae
from pipelines.flux3_action.tables import StaticTables
from pipelines.flux3_action.weights import Components, load_components
from pipelines.pipeline import Pipeline, PipelineDescription, Placement
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.weights_config import WeightsConfig
from stages.guidance import resolve_guidance
from stages.stage import State


class Flux3Config(Protocol):
    """What this pipeline reads of the configuration; see `tasks.config.RunConfig`."""

    @property
    def model(self) -> Flux3Settings: ...
    @property
    def accel(self) -> AccelPolicy: ...
    @property
    def weights(self) -> WeightsConfig: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def prompt(self) -> str | None: ...
    @property
    def observation(self) -> ObservationSource | None: ...


def load(
    config: Flux3Config, *, placement: Placement, progress: Progress = NULL_PROGRESS
) -> Flux3ActionPipeline:
    """Load components and make the pipeline.

    Raises: CheckpointError, ConfigError, DeviceMemoryError; see `load_components`.
    """
    components = load_components(
        weights=config.weights,
        variant=config.model.variant,
        size=placement.size,
        device=placement.device,
        dtype=placement.dtype,
        progress=progress,
    )
    return Flux3ActionPipeline(
        components,
        policy=config.accel,
        placement=placement,
        outputs_mean_nothing=config.weights.kind == "synthetic",
        caption_cache_tokens=config.model.caption_cache_tokens,
    )


class Flux3ActionPipeline(Pipeline[ActionRequest, ActionResult]):
    """Text encoding, VAE, observation encoding, denoising, action decoding."""

    def __init__(
        self,
        components: Components,
        *,
        policy: AccelPolicy,
        placement: Placement,
        outputs_mean_nothing: bool,
        caption_cache_tokens: int = 65536,
    ) -> None:
        self.config: PolicyConfig = components.config
        device, dtype = placement.device, placement.dtype
        transformer = components.transformer
        components.vae.prepare((1, *self.config.canvas_hw))
        tables = StaticTables(self.config, transformer, device=device)
        super().__init__(
            description=PipelineDescription(
                model="flux3_action",
                size=placement.size,
                size_reason=placement.size_reason,
                weights=components.description,
                device=str(device),
                dtype=str(dtype).removeprefix("torch."),
                outputs_mean_nothing=outputs_mean_nothing,
            ),
            device=device,
            policy=policy,
            stages=(
                TextEncoding(
                    tokenizer=components.tokenizer,
                    encoder=components.text_encoder,
                    transformer=transformer,
                    tables=tables,
                    device=device,
                    cache_tokens=caption_cache_tokens,
                ),
                Vae(config=self.config, vae=components.vae, device=device, dtype=dtype),
                ObservationEncoding(
                    config=self.config, transformer=transformer, tables=tables, device=device, dtype=dtype
                ),
                Denoising(
                    config=self.config, transformer=transformer, tables=tables, device=device, dtype=dtype
                ),
                ActionDecoding(config=self.config),
            ),
        )

    def request(
        self,
        observation: Observation,
        *,
        seed: int | None = None,
        settings: Flux3Settings | None = None,
    ) -> ActionRequest:
        """Fill what the request leaves open from the package's own defaults (spec section 14.3).

        Raises: ConfigError for a value outside its range, naming the key.
        """
        settings = settings or Flux3Settings()
        config = self.config
        steps = config.num_inference_steps if settings.steps is None else settings.steps
        shift = config.sampler_shift if settings.shift is None else settings.shift
        horizon = config.chunk_size if settings.horizon is None else settings.horizon
        seed = config.inference_seed if seed is None else seed
        _require(seed >= 0, "seed", seed, "a whole number >= 0")
        _require(steps >= 1, "model.steps", steps, "a whole number >= 1")
        _require(shift > 0, "model.shift", shift, "a number > 0")
        _require(
            1 <= horizon <= config.chunk_size, "model.horizon", horizon, f"1..{config.chunk_size} actions"
        )
        video, action = resolve_guidance(
            config.guidance_scale, config.guidance_scale_action, settings.guidance, settings.guidance_action
        )
        _require(video >= 0, "model.guidance", video, "a number >= 0")
        _require(action >= 0, "model.guidance_action", action, "a number >= 0")
        return ActionRequest(
            observation=observation,
            seed=seed,
            steps=steps,
            sampler=settings.sampler or config.sampler,
            shift=shift,
            guidance_video=video,
            guidance_action=action,
            horizon=horizon,
        )

    def request_from(self, config: Flux3Config) -> ActionRequest:
        """The request of a run configuration. A prompt that is set wins over the observation's own."""
        assert config.observation is not None
        source = config.observation
        raw = dict(_load_observation(source))
        if config.prompt is not None:
            raw["prompt"] = config.prompt
        image_format = ImageFormat(layout=source.layout, order=source.order, value_range=source.value_range)
        observation = parse_observation(raw, self.config, image_format)
        return self.request(observation, seed=config.seed, settings=config.model)

    def files(self, result: ActionResult, *, config_hash: str) -> dict[str, bytes]:
        """actions.npy, actions.json, actions.png and canvas.png; see `outputs.action_files`."""
        origin = Origin(config_hash=config_hash, outputs_mean_nothing=self.description.outputs_mean_nothing)
        return action_files(result, channels=channels_of(self.config), origin=origin)

    def _begin(self, request: ActionRequest, progress: Progress) -> State:
        if request.observation.state.shape != (self.config.action_dim,):
            raise ObservationError(
                f"state: {tuple(request.observation.state.shape)} values, "
                f"this policy takes {self.config.action_dim}."
            )
        return State(request=request, progress=progress)

    def _finish(self, state: State) -> ActionResult:
        request: ActionRequest = state["request"]
        return ActionResult(
            actions=state["actions"].numpy(),
            state=request.observation.state.numpy(),
            canvas=state["canvas"].numpy(),
            fps=self.config.fps,
            prompt=request.observation.prompt,
            seed=request.seed,
            outputs=self._stage_outputs(state),
        )


def _load_observation(source: ObservationSource) -> RawObservation:
    if source.episode is not None:
        return load_episode_frame(source.episode, source.frame)
    if source.npz is not None:
        return load_npz(source.npz)
    assert source.images is not None
    assert source.state is not None
    return load_image_files(source.images, source.state)


def _require(holds: bool, key: str, value: object, legal: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={value} is out of range; use {legal}.")
