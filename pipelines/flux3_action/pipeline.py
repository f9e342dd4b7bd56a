"""FLUX 3 Action from components to actions."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from accel.errors import ConfigError, ObservationError
from accel.policy import AccelPolicy
from pipelines.flux3_action.denoising import Denoising
from pipelines.flux3_action.observation import Observation, parse_observation
from pipelines.flux3_action.observation_files import load_observation
from pipelines.flux3_action.outputs import Origin, action_files, channels_of
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.request import ActionRequest, ActionResult
from pipelines.flux3_action.settings import Flux3Settings, ObservationSource
from pipelines.flux3_action.stages import ActionDecoding, ObservationEncoding, TextEncoding, Vae
from pipelines.flux3_action.tables import StaticTables
from pipelines.flux3_action.weights import Components, load_components
from pipelines.generation_config import GenerationConfig
from pipelines.pipeline import Pipeline, PipelineDescription, Placement
from pipelines.progress import NULL_PROGRESS, Progress
from stages.guidance import resolve_guidance
from stages.stage import State


class Flux3Config(GenerationConfig[Flux3Settings], Protocol):
    """What this pipeline reads of the configuration; see `tasks.config.RunConfig`."""

    @property
    def observation(self) -> ObservationSource | None: ...


def load(
    config: Flux3Config, *, placement: Placement, progress: Progress = NULL_PROGRESS
) -> Flux3ActionPipeline:
    """Load components and make the pipeline.

    Raises: ObservationError before anything else is read if the observation's files are missing or damaged;
        CheckpointError, ConfigError, DeviceMemoryError as `load_components`.
    """
    if config.observation is not None:
        load_observation(config.observation)
    components = load_components(
        weights=config.weights,
        variant=config.model.variant,
        size=placement.size,
        device=placement.device,
        dtype=placement.dtype,
        check=partial(_require_horizon, config.model.horizon),
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
            description=PipelineDescription.of(
                "flux3_action",
                placement,
                weights=components.description,
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
            remake=lambda policy: Flux3ActionPipeline(
                components,
                policy=policy,
                placement=placement,
                outputs_mean_nothing=outputs_mean_nothing,
                caption_cache_tokens=caption_cache_tokens,
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

        Raises: ConfigError for a value outside its range, naming the field; ObservationError for a state
            of another width.
        """
        settings = settings or Flux3Settings()
        config = self.config
        video, action = resolve_guidance(
            config.guidance_scale, config.guidance_scale_action, settings.guidance, settings.guidance_action
        )
        request = ActionRequest(
            observation=observation,
            seed=config.inference_seed if seed is None else seed,
            steps=config.num_inference_steps if settings.steps is None else settings.steps,
            sampler=config.sampler if settings.sampler is None else settings.sampler,
            shift=config.sampler_shift if settings.shift is None else settings.shift,
            guidance_video=video,
            guidance_action=action,
            horizon=config.chunk_size if settings.horizon is None else settings.horizon,
        )
        self._check(request)
        return request

    def request_from(self, config: Flux3Config) -> ActionRequest:
        """The request that `observation`, `prompt`, `seed` and `model` of a run configuration describe.

        A prompt that is set wins over the observation's own. Of `model`, the keys of a request are read:
        steps, guidance, guidance_action, sampler, shift, horizon. What made this pipeline (the variant,
        weights, size, device, dtype and policy) stays as it is, whatever the configuration says.
        """
        assert config.observation is not None
        raw = load_observation(config.observation)
        if config.prompt is not None:
            raw["prompt"] = config.prompt
        observation = parse_observation(raw, self.config, config.observation.image_format())
        return self.request(observation, seed=config.seed, settings=config.model)

    def files(self, result: ActionResult, *, config_hash: str) -> dict[str, bytes]:
        """actions.npy, actions.json, actions.png and canvas.png; see `outputs.action_files`."""
        origin = Origin(config_hash=config_hash, outputs_mean_nothing=self.description.outputs_mean_nothing)
        return action_files(result, channels=channels_of(self.config), origin=origin)

    def _begin(self, request: ActionRequest, progress: Progress) -> State:
        self._check(request)
        return State(request=request, progress=progress)

    def _check(self, request: ActionRequest) -> None:
        """Refuse what another policy might serve."""
        shape, width = tuple(request.observation.state.shape), self.config.action_dim
        if shape != (width,):
            raise ObservationError(f"state: shape {shape}; this policy takes ({width},).")
        _require_horizon(request.horizon, self.config)

    def _finish(self, state: State) -> ActionResult:
        request: ActionRequest = state["request"]
        canvas = state["canvas"].numpy()
        canvas.flags.writeable = False  # instead of a copy that every robot would wait for
        return ActionResult(
            actions=state["actions"].numpy().copy(),
            state=request.observation.state.numpy().copy(),
            canvas=canvas,
            fps=self.config.fps,
            prompt=request.observation.prompt,
            seed=request.seed,
            outputs=self._stage_outputs(state),
            notes=state["notes"],
        )


def _require_horizon(horizon: int | None, config: PolicyConfig) -> None:
    """Raises: ConfigError for more actions than a chunk of the policy has."""
    if horizon is not None and horizon > config.chunk_size:
        raise ConfigError(
            f"model.horizon={horizon} is out of range; this policy returns 1..{config.chunk_size} actions."
        )
