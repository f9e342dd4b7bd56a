"""LTX-2 from components to videos with sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from accel.errors import ConfigError
from accel.policy import AccelPolicy
from pipelines.generation_config import GenerationConfig
from pipelines.ltx2 import components as ltx2_components
from pipelines.ltx2.architectures import Size
from pipelines.ltx2.attention_breaks import DenoisingByPass, break_at_attention
from pipelines.ltx2.components import Components, require_blocks
from pipelines.ltx2.decoding import AudioVae, Vae, Vocoder
from pipelines.ltx2.denoising import Denoising
from pipelines.ltx2.media import require_av
from pipelines.ltx2.outputs import video_files
from pipelines.ltx2.refinement import Refinement
from pipelines.ltx2.request import VideoRequest, VideoResult, video_request
from pipelines.ltx2.schedule import unshifted
from pipelines.ltx2.settings import Ltx2Settings, SaveAs
from pipelines.ltx2.stages import Connectors, LatentPreparation, TextEncoding
from pipelines.ltx2.upsampling import Upsampling
from pipelines.ltx2.working_memory import working_memory
from pipelines.pictures import open_picture
from pipelines.pipeline import Pipeline, PipelineDescription, Placement
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.transfer import read_back
from stages.stage import Stage, State

STG_WITHOUT_EFFECT = (
    "model.stg: these weights have no perturbed attention, so its pass adds nothing but rounding, as in the "
    "released pipeline; model.stg=0 saves it."
)
NEGATIVE_WITHOUT_EFFECT = "model.negative_prompt: has no effect while the guidance scales are at most 1."


Ltx2Config = GenerationConfig[Ltx2Settings]


def load(config: Ltx2Config, *, placement: Placement, progress: Progress = NULL_PROGRESS) -> Ltx2Pipeline:
    """Load components and make the pipeline.

    Raises: ConfigError before anything is loaded if the request can't be served;
        CheckpointError, ConfigError, DeviceMemoryError as `components.load`.
    """
    settings = config.model
    request = _request(config, placement.size, two_stage=settings.two_stage)
    if settings.attention_breaks and config.accel.for_stage("denoising").graph_mode != "segmented":
        raise ConfigError("model.attention_breaks: has no effect without segments; use accel=segmented.")
    if settings.save_as != "frames":
        require_av(f"model.save_as={settings.save_as}")
    if request.image is not None and request.image_crf:
        require_av(f"model.image_crf={request.image_crf}")
    components = ltx2_components.load(
        weights=config.weights,
        variant=settings.variant,
        size=placement.size,
        dtype=placement.dtype,
        device=placement.device,
        stg_blocks=request.guidance.stg_blocks,
        two_stage=settings.two_stage,
        working_memory=lambda modules, tokens: working_memory(
            request, config.accel, modules, tokens=tokens, cached_tokens=settings.prompt_cache_tokens
        ),
        progress=progress,
    )
    if settings.attention_breaks:
        break_at_attention(components.transformer)
    return Ltx2Pipeline(
        components,
        policy=config.accel,
        placement=placement,
        outputs_mean_nothing=config.weights.kind == "synthetic",
        prompt_cache_tokens=settings.prompt_cache_tokens,
        save_as=settings.save_as,
        attention_breaks=settings.attention_breaks,
    )


class Ltx2Pipeline(Pipeline[VideoRequest, VideoResult]):
    """Text encoding, connectors, latent preparation, denoising, VAE, audio VAE, vocoder.

    With a latent upsampler, denoising is of half the height and width, and upsampling and refinement follow.
    """

    def __init__(
        self,
        components: Components,
        *,
        policy: AccelPolicy,
        placement: Placement,
        outputs_mean_nothing: bool,
        prompt_cache_tokens: int = 4096,
        save_as: SaveAs = "mp4",
        attention_breaks: bool = False,
    ) -> None:
        """attention_breaks: the transformer has them; every pass is then a graph of its own."""
        self._components = components
        self._size = placement.size
        self._save_as = save_as
        device, dtype = placement.device, placement.dtype
        vae, audio_vae, transformer = components.vae, components.audio_vae, components.transformer
        denoising = DenoisingByPass if attention_breaks else Denoising
        super().__init__(
            description=PipelineDescription.of(
                "ltx2",
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
                    device=device,
                    cache_tokens=prompt_cache_tokens,
                ),
                Connectors(connectors=components.connectors, transformer=transformer),
                LatentPreparation(vae=vae, audio_vae=audio_vae, device=device, dtype=dtype),
                denoising(
                    transformer=transformer, scheduler=components.scheduler, device=device, dtype=dtype
                ),
                *_second_pass(components, device=device, dtype=dtype),
                Vae(vae=vae, dtype=dtype),
                AudioVae(audio_vae=audio_vae, dtype=dtype),
                Vocoder(vocoder=components.vocoder),
            ),
            remake=lambda policy: Ltx2Pipeline(
                components,
                policy=policy,
                placement=placement,
                outputs_mean_nothing=outputs_mean_nothing,
                prompt_cache_tokens=prompt_cache_tokens,
                save_as=save_as,
                attention_breaks=attention_breaks,
            ),
        )

    def request_from(self, config: Ltx2Config) -> VideoRequest:
        """The request that `prompt`, `seed` and `model` of a run configuration describe; see `video_request`.

        What made this pipeline (weights, size, device, dtype, policy and stages) stays as it is, whatever
        the configuration says.
        """
        return _request(config, self._size, two_stage=self._two_stage)

    @property
    def _two_stage(self) -> bool:
        return self._components.latent_upsampler is not None

    def files(self, result: VideoResult, *, config_hash: str) -> dict[str, bytes]:
        """video.mp4, or frames and sound.wav; see `outputs.video_files`."""
        return video_files(
            result,
            save_as=self._save_as,
            model=self.description.model,
            config_hash=config_hash,
            outputs_mean_nothing=self.description.outputs_mean_nothing,
        )

    def _begin(self, request: VideoRequest, progress: Progress) -> State:
        require_blocks(request.guidance.stg_blocks, self._components.transformer)
        if (request.refinement is not None) != self._two_stage:
            raise ConfigError(
                f"model.two_stage: this pipeline was made with {self._two_stage}, the request with "
                f"{not self._two_stage}. Take the request from `request_from`, or make another pipeline."
            )
        generator = torch.Generator("cpu").manual_seed(request.seed)
        return State(request=request, progress=progress, generator=generator)

    def _finish(self, state: State) -> VideoResult:
        request: VideoRequest = state["request"]
        return VideoResult(
            frames=read_back(state["frames"]),
            waveform=read_back(state["waveform"]),
            fps=request.fps,
            sampling_rate=self._components.vocoder.config.output_sampling_rate,
            prompt=request.prompt,
            seed=request.seed,
            outputs=self._stage_outputs(state),
            notes=(*request.notes, *state["notes"], *self._without_effect(request)),
        )

    def _without_effect(self, request: VideoRequest) -> Iterator[str]:
        """What was asked for and changes nothing."""
        if request.guidance.stg and not self._components.transformer.config.perturbed_attn:
            yield STG_WITHOUT_EFFECT
        if request.negative_prompt and not request.guidance.text:
            yield NEGATIVE_WITHOUT_EFFECT


def _second_pass(components: Components, *, device: torch.device, dtype: torch.dtype) -> Iterator[Stage]:
    """The stages between the first pass and decoding, none without a latent upsampler."""
    if components.latent_upsampler is None:
        return
    yield Upsampling(
        upsampler=components.latent_upsampler,
        vae=components.vae,
        audio_vae=components.audio_vae,
        device=device,
        dtype=dtype,
    )
    yield Refinement(
        transformer=components.transformer,
        scheduler=unshifted(components.scheduler),
        device=device,
        dtype=dtype,
    )


def _request(config: Ltx2Config, size: Size, *, two_stage: bool) -> VideoRequest:
    settings = replace(config.model, two_stage=two_stage)
    image, notes = (None, ()) if settings.image is None else open_picture(settings.image, name="model.image")
    return video_request(
        config.prompt, settings=settings, size=size, seed=config.seed, image=image, notes=notes
    )
