"""FLUX.2 from components to images."""

from __future__ import annotations

from accel.policy import AccelPolicy
from pipelines.flux2.denoising import Denoising
from pipelines.flux2.images import load_references
from pipelines.flux2.outputs import image_files
from pipelines.flux2.request import ImageRequest, ImageResult
from pipelines.flux2.settings import Flux2Settings
from pipelines.flux2.stages import ImageEncoding, TextEncoding, Vae
from pipelines.flux2.weights import Components, load_flux2
from pipelines.generation_config import GenerationConfig
from pipelines.pipeline import Pipeline, PipelineDescription, Placement
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.prompt_tokens import required_prompt
from pipelines.transfer import read_back
from stages.stage import State

IGNORED_GUIDANCE = "model.guidance: distilled variants run without guidance; the scale has no effect."
MEANINGLESS = "Synthetic weights: this image means nothing."


Flux2RunConfig = GenerationConfig[Flux2Settings]


def load(
    config: Flux2RunConfig, *, placement: Placement, progress: Progress = NULL_PROGRESS
) -> Flux2Pipeline:
    """Load components and make the pipeline.

    Raises: ConfigError before anything else is read if there is no prompt, or if a reference image is missing
        or can't be used; CheckpointError, ConfigError, DeviceMemoryError as `load_flux2`.
    """
    _prompt(config)
    load_references(config.model.images)
    components = load_flux2(
        weights=config.weights,
        variant=config.model.variant,
        size=placement.size,
        device=placement.device,
        dtype=placement.dtype,
        progress=progress,
    )
    return Flux2Pipeline(
        components,
        model=config.model.name,
        policy=config.accel,
        placement=placement,
        outputs_mean_nothing=config.weights.kind == "synthetic",
        prompt_cache_tokens=config.model.prompt_cache_tokens,
    )


class Flux2Pipeline(Pipeline[ImageRequest, ImageResult]):
    """Text encoding, image encoding, denoising, VAE."""

    def __init__(
        self,
        components: Components,
        *,
        model: str,
        policy: AccelPolicy,
        placement: Placement,
        outputs_mean_nothing: bool,
        prompt_cache_tokens: int = 16384,
    ) -> None:
        self.config = components.config
        self._notes = components.notes
        device, dtype = placement.device, placement.dtype
        super().__init__(
            description=PipelineDescription.of(
                model,
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
                    classifier_free_guidance=self.config.classifier_free_guidance,
                    device=device,
                    cache_tokens=prompt_cache_tokens,
                ),
                ImageEncoding(vae=components.vae, device=device, dtype=dtype),
                Denoising(
                    transformer=components.transformer,
                    scheduler=components.scheduler,
                    embedded_guidance=self.config.embedded_guidance,
                    device=device,
                    dtype=dtype,
                ),
                Vae(vae=components.vae),
            ),
            remake=lambda policy: Flux2Pipeline(
                components,
                model=model,
                policy=policy,
                placement=placement,
                outputs_mean_nothing=outputs_mean_nothing,
                prompt_cache_tokens=prompt_cache_tokens,
            ),
        )

    def request_from(self, config: Flux2RunConfig) -> ImageRequest:
        """The request that `prompt`, `seed` and `model` of a run configuration describe.

        A seed that is not set is 0; steps and guidance that are not set are the variant's own. What made this
        pipeline (the variant, weights, size, device, dtype and policy) stays as it is, whatever the
        configuration says. Raises: ConfigError, also for a prompt that is not set or blank.
        """
        model, own = config.model, self.config
        return ImageRequest(
            prompt=_prompt(config),
            seed=config.seed or 0,
            height=model.height,
            width=model.width,
            steps=own.steps if model.steps is None else model.steps,
            guidance=own.guidance if model.guidance is None else model.guidance,
            images=model.images_per_prompt,
            references=load_references(model.images),
        )

    def files(self, result: ImageResult, *, config_hash: str) -> dict[str, bytes]:
        """image.png, or image_0.png and so on; see `outputs.image_files`."""
        own = (MEANINGLESS,) if self.description.outputs_mean_nothing else ()
        return image_files(
            result,
            model=self.description.model,
            config_hash=config_hash,
            note=" ".join((*own, *result.notes)),
        )

    def _begin(self, request: ImageRequest, progress: Progress) -> State:
        return State(request=request, progress=progress)

    def _finish(self, state: State) -> ImageResult:
        request: ImageRequest = state["request"]
        ignored = (IGNORED_GUIDANCE,) if self.config.distilled and request.guidance > 1 else ()
        from_images = (note for reference in request.references for note in reference.notes)
        return ImageResult(
            images=read_back(state["images"]),
            prompt=request.prompt,
            seed=request.seed,
            outputs=self._stage_outputs(state),
            notes=(*self._notes, *state["notes"], *ignored, *from_images),
        )


def _prompt(config: Flux2RunConfig) -> str:
    return required_prompt(config.prompt, of="image", example="a lighthouse at dusk")
