"""The denoising stage of FLUX.2: a loop over network evaluations.

Shapes: B images, N tokens of the image that is made, R of reference images, L text tokens, C channels of
a token, J of prompt embeddings, D transformer width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel.fusion import guided_euler_step
from accel.fusion.mounting import Mount, mount
from accel.fusion.savings import takes
from accel.graphs.tree import map_tensors
from accel.loops import iterate
from accel.region import loop_body, region
from pipelines.flux2 import transformer_pass
from pipelines.flux2.fused_blocks import TRANSFORMER_FORWARDS
from pipelines.flux2.position_ids import Grid, image_position_ids, text_position_ids
from pipelines.flux2.request import ImageRequest
from pipelines.flux2.schedule import flow_match_schedule
from pipelines.flux2.transformer_pass import Modulations, Rope, predict
from pipelines.progress import Progress
from pipelines.transfer import upload
from stages.stage import Field, Stage, State


@dataclass(frozen=True)
class DenoisingStep:
    """The inputs of one step. width: fp32, no dimensions, of the Euler step."""

    modulations: Modulations
    width: Tensor


@dataclass(frozen=True)
class Conditioning:
    """What all steps of a request share.

    context: (B, L, D) of the prompt. null_context: likewise of the empty prompt, or `None` without
    classifier-free guidance. references: (B, R, C), or `None` without images.
    """

    context: Tensor
    null_context: Tensor | None
    references: Tensor | None
    rope: Rope


class Denoising(Stage):
    """Noise -> latents of the images, by flow matching."""

    name: ClassVar[str] = "denoising"
    reads: ClassVar[tuple[Field, ...]] = (
        Field("request"),
        Field("prompt_embeds"),
        Field("negative_prompt_embeds"),
        Field("reference_tokens"),
        Field("reference_grids"),
        Field("progress"),
    )
    writes: ClassVar[tuple[Field, ...]] = (
        Field("latents", "(B, N, C)", "model dtype, normalised tokens of the images"),
    )
    # Kept tables: choices of steps and sizes are few, but a client may sweep them.
    max_tables: ClassVar[int] = 8

    def __init__(
        self,
        *,
        transformer: Any,
        scheduler: Any,
        embedded_guidance: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._transformer = transformer
        self._scheduler = scheduler
        self._embedded_guidance = embedded_guidance
        self._device = device
        self._dtype = dtype
        self._steps = lru_cache(maxsize=self.max_tables)(self._compute_steps)
        self._rope = lru_cache(maxsize=self.max_tables)(self._compute_rope)

    def modules(self) -> Mapping[str, nn.Module]:
        return {"transformer": self._transformer}

    def mounts(self, allowed: frozenset[str]) -> Sequence[Mount]:
        return mount(self._transformer, TRANSFORMER_FORWARDS, allowed=allowed)

    def forget(self) -> None:
        self._steps.cache_clear()

    def run(self, state: State) -> None:
        request: ImageRequest = state["request"]
        progress: Progress = state["progress"]
        null_embeds: Tensor | None = state["negative_prompt_embeds"]
        references: Tensor | None = state["reference_tokens"]
        images = request.images
        conditioning = Conditioning(
            context=self.embed(state["prompt_embeds"].repeat(images, 1, 1)),
            null_context=None if null_embeds is None else self.embed(null_embeds.repeat(images, 1, 1)),
            references=None if references is None else references.repeat(images, 1, 1),
            rope=self._rope(state["prompt_embeds"].shape[1], request.grid, state["reference_grids"]),
        )
        progress.start("denoising", request.steps)
        state["latents"] = iterate(
            self.advance,
            self.noise(request),
            self.steps(request),
            conditioning,
            on_step=lambda: progress.advance("denoising"),
            # A constant of the graph: without a second pass its value must not make another one.
            guidance=1.0 if null_embeds is None else request.guidance,
        )
        progress.finish("denoising")

    def noise(self, request: ImageRequest) -> Tensor:
        """(B, N, C), drawn for all images at once on a CPU generator, in the model dtype."""
        channels = self._transformer.config.in_channels
        noise = torch.randn(
            (request.images, channels, *request.grid),
            generator=torch.Generator("cpu").manual_seed(request.seed),
            dtype=self._dtype,
            device="cpu",
        )
        # The tokens stay a transposed view: products of other strides may round differently.
        return upload(noise, self._device).flatten(2).permute(0, 2, 1)

    def steps(self, request: ImageRequest) -> tuple[DenoisingStep, ...]:
        """The inputs of every step of a request; kept, so not to be written to."""
        guidance = float(request.guidance) if self._embedded_guidance else None
        rows, columns = request.grid
        return self._steps(request.steps, rows * columns, request.images, guidance)

    def _compute_steps(
        self, steps: int, image_tokens: int, images: int, guidance: float | None
    ) -> tuple[DenoisingStep, ...]:
        schedule = flow_match_schedule(self._scheduler, steps=steps, image_tokens=image_tokens)
        scale = (
            None
            if guidance is None
            else torch.full([1], guidance, dtype=torch.float32, device=self._device).expand(images)
        )
        # The model's dtype rounds timesteps before they are embedded, as in diffusers' pipelines.
        timesteps, widths = schedule.timesteps.to(self._device), schedule.widths.to(self._device)
        return tuple(
            DenoisingStep(
                transformer_pass.modulations(
                    self._transformer, timestep.expand(images).to(self._dtype) / 1000, scale
                ),
                width,
            )
            for timestep, width in zip(timesteps, widths, strict=True)
        )

    def _compute_rope(self, text_tokens: int, grid: Grid, references: tuple[Grid, ...]) -> Rope:
        return transformer_pass.rope(
            self._transformer,
            text_position_ids(text_tokens).to(self._device),
            image_position_ids(grid, references).to(self._device),
        )

    @region
    def embed(self, prompt_embeds: Tensor) -> Tensor:
        """(B, L, J) -> (B, L, D)."""
        return transformer_pass.embed_context(self._transformer, prompt_embeds)

    @loop_body("chain")
    def advance(
        self, latents: Tensor, step: DenoisingStep, shared: Conditioning, *, guidance: float
    ) -> Tensor:
        """One step: (B, N, C) -> (B, N, C)."""
        return guided_euler_step(
            latents, *self.velocities(latents, step, shared), guidance=guidance, delta=step.width
        )

    def velocities(
        self, latents: Tensor, step: DenoisingStep, shared: Conditioning
    ) -> tuple[Tensor, Tensor | None]:
        """The network's, (B, N, C), with the prompt and, for classifier-free guidance, without."""
        references = shared.references
        tokens = latents if references is None else torch.cat([latents, references], dim=1)

        def predicted(tokens: Tensor, context: Tensor, modulations: Modulations) -> Tensor:
            velocity = predict(self._transformer, tokens, context, rope=shared.rope, modulations=modulations)
            return velocity[:, : latents.shape[1]]

        context, null_context = shared.context, shared.null_context
        if null_context is None:
            return predicted(tokens, context, step.modulations), None
        if takes("batched_guidance"):
            tokens, modulations = map_tensors((tokens, step.modulations), lambda rows: torch.cat([rows] * 2))
            both = predicted(tokens, torch.cat([context, null_context]), modulations)
            conditional, unconditional = both.chunk(2)
            return conditional, unconditional
        return (
            predicted(tokens, context, step.modulations),
            predicted(tokens, null_context, step.modulations),
        )
