"""The denoising stage of LTX-2: a loop over up to three kinds of passes a step.

Shapes: B videos, R rows (2 B with a negative prompt, which comes first), V video tokens, A audio tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel.fusion.mounting import Mount, mount
from accel.fusion.savings import takes
from accel.loops import iterate
from accel.region import loop_body
from pipelines.ltx2.block_modulation import accept_sums
from pipelines.ltx2.fused_blocks import TRANSFORMER_FORWARDS
from pipelines.ltx2.guidance import Guidance, Velocities, guide
from pipelines.ltx2.latent_shapes import Latents, LatentShape, pack_video, unpack_video
from pipelines.ltx2.request import VideoRequest
from pipelines.ltx2.schedule import DenoisingStep, NoiseLevel, denoising_steps
from pipelines.ltx2.stages import PromptText
from pipelines.ltx2.text_attention import accept_keys
from pipelines.ltx2.text_keys import AttendedText, TextKeys, has_positive_keys, text_keys
from pipelines.ltx2.transformer_pass import (
    Embedding,
    RotaryTables,
    Text,
    Transformer,
    clip_tables,
    embed_video_timestep,
    transformer_pass,
)
from pipelines.progress import Progress
from stages.stage import Field, Stage, State


@dataclass(frozen=True)
class Conditioning:
    """What all steps of a request share.

    rope: of R rows. given: fp32 (R, V), 1 at tokens of a given first frame; `None` without one.
    """

    text: AttendedText
    rope: RotaryTables
    given: Tensor | None


class Denoising(Stage):
    """Noise -> latents of both modalities, by flow matching."""

    name: ClassVar[str] = "denoising"
    reads: ClassVar[tuple[Field, ...]] = (
        Field("request"),
        Field("text"),
        Field("noise"),
        Field("given"),
        Field("progress"),
    )
    writes: ClassVar[tuple[Field, ...]] = (
        Field("latents", "(B, V, C) and (B, A, Ca M)", "fp32 `Latents`, normalised"),
    )
    # Schedules and rotary tables kept: the tables of one long clip take hundreds of MB.
    max_kept: ClassVar[int] = 2

    def __init__(
        self, *, transformer: Transformer, scheduler: Any, device: torch.device, dtype: torch.dtype
    ) -> None:
        accept_keys(transformer)
        accept_sums(transformer)
        self._transformer = transformer
        self._scheduler = scheduler
        self._device = device
        self._dtype = dtype
        self._prepared = lru_cache(maxsize=self.max_kept)(self._prepare)

    def modules(self) -> Mapping[str, nn.Module]:
        return {"transformer": self._transformer}

    def mounts(self, allowed: frozenset[str]) -> Sequence[Mount]:
        return mount(self._transformer, TRANSFORMER_FORWARDS, allowed=allowed)

    def forget(self) -> None:
        self._prepared.cache_clear()

    def run(self, state: State) -> None:
        request: VideoRequest = state["request"]
        state["latents"] = self.denoised(
            state["noise"],
            request,
            text=state["text"],
            given=state["given"],
            sigmas=request.sigmas,
            guidance=request.guidance,
            progress=state["progress"],
        )

    def denoised(
        self,
        start: Latents,
        request: VideoRequest,
        *,
        text: PromptText,
        given: Tensor | None,
        sigmas: tuple[float, ...],
        guidance: Guidance,
        progress: Progress,
    ) -> Latents:
        """Every step from `start`, which is at the first noise level. given: fp32 (B, V), or `None`."""
        rows = request.videos * (2 if guidance.text else 1)
        steps, rope = self._prepared(
            start.shape,
            sigmas=sigmas,
            fps=request.fps,
            rows=rows,
            videos=request.videos,
            per_token=given is not None,
        )
        if given is not None:
            given = torch.cat([given] * (rows // request.videos))
        progress.start(self.name, len(steps))
        latents = iterate(
            self.advance,
            start,
            steps,
            Conditioning(self._attended(text, guidance), rope, given),
            on_step=lambda: progress.advance(self.name),
            guidance=guidance,
        )
        progress.finish(self.name)
        return latents

    def _attended(self, text: PromptText, guidance: Guidance) -> AttendedText:
        """Keys and values of the text for each kind of rows that a pass has."""
        batch = text_keys(self._transformer, text.batch)
        if not guidance.text:
            return AttendedText(batch, batch)
        if not has_positive_keys(guidance, self._transformer):
            return AttendedText(batch, text.positive)
        return AttendedText(batch, text_keys(self._transformer, text.positive))

    def _prepare(
        self,
        shape: LatentShape,
        *,
        sigmas: tuple[float, ...],
        fps: float,
        rows: int,
        videos: int,
        per_token: bool,
    ) -> tuple[tuple[DenoisingStep, ...], RotaryTables]:
        """The inputs of every step and the rotary tables; kept, so not to be written to."""
        steps = denoising_steps(
            self._transformer,
            self._scheduler,
            sigmas=sigmas,
            tokens=shape.tokens,
            rows=rows,
            videos=videos,
            per_token=per_token,
            dtype=self._dtype,
            device=self._device,
        )
        return steps, clip_tables(self._transformer, shape, fps=fps, rows=rows, device=self._device)

    @loop_body("chain")
    def advance(
        self, carry: Latents, step: DenoisingStep, shared: Conditioning, *, guidance: Guidance
    ) -> Latents:
        """One Euler step of both modalities; tokens of a given first frame stay as they are."""
        velocities = self.velocities(carry, step, shared, guidance)
        keeps_first = shared.given is not None
        return self.euler_step(
            carry, velocities, step.sigma, step.delta, guidance=guidance, keeps_first=keeps_first
        )

    def velocities(
        self, latents: Latents, step: DenoisingStep, shared: Conditioning, guidance: Guidance
    ) -> tuple[Velocities, Velocities]:
        """Every pass that the guidance asks for: fp32 velocities of video and audio."""
        passes: dict[str, tuple[Tensor, Tensor]] = {}
        text, level, shape = shared.text.batch, step.batch, latents.shape
        if guidance.text:
            doubled = Latents(torch.cat([latents.video] * 2), torch.cat([latents.audio] * 2), shape)
            video, audio = self.forward_pass(doubled, level, text, shared.rope, shared.given)
            passes["unconditional"], passes["conditional"] = zip(video.chunk(2), audio.chunk(2), strict=True)
        else:
            passes["conditional"] = self.forward_pass(latents, level, text, shared.rope, shared.given)
        rows = latents.video.shape[0]
        given = None if shared.given is None else shared.given[:rows]
        alone = (latents, step.positive, shared.text.positive, shared.rope.first(rows), given)
        if guidance.stg and not self._skips_stg():
            passes["perturbed"] = self.forward_pass(*alone, perturbed=guidance.stg_blocks)
        if guidance.modality:
            passes["isolated"] = self.forward_pass(*alone, isolated=True)
        return (
            Velocities(**{kind: video for kind, (video, _) in passes.items()}),
            Velocities(**{kind: audio for kind, (_, audio) in passes.items()}),
        )

    def _skips_stg(self) -> bool:
        """Whether to leave out a pass that repeats the conditional one: its contrast is rounding noise."""
        perturbs = (
            "the transformer has perturbed attention" if self._transformer.config.perturbed_attn else ""
        )
        return takes("skip_ineffective_stg", unless=perturbs)

    def forward_pass(
        self,
        latents: Latents,
        level: NoiseLevel,
        text: Text | TextKeys,
        rope: RotaryTables,
        given: Tensor | None,
        *,
        perturbed: tuple[int, ...] = (),
        isolated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """One forward of the transformer: fp32 velocities shaped like the latents.

        All arguments have the rows of `latents`. given: fp32 (rows, V), 1 at tokens of a given first frame.
        """
        video, audio = transformer_pass(
            self._transformer,
            latents.video.to(self._dtype),
            latents.audio.to(self._dtype),
            text=text,
            rope=rope,
            video_time=self._video_time(level, given),
            modulation=level.modulation,
            perturbed=perturbed,
            isolated=isolated,
        )
        return video.float(), audio.float()

    def euler_step(
        self,
        latents: Latents,
        velocities: tuple[Velocities, Velocities],
        sigma: Tensor,
        delta: Tensor,
        *,
        guidance: Guidance,
        keeps_first: bool,
    ) -> Latents:
        """Guide both modalities and move on by `delta`; `keeps_first`: not the first frame of the video."""
        shape, (video_velocities, audio_velocities) = latents.shape, velocities
        video = guide(latents.video, sigma, video_velocities, guidance.video)
        audio = guide(latents.audio, sigma, audio_velocities, guidance.audio)
        next_audio = latents.audio + delta * audio
        if not keeps_first:
            return Latents(latents.video + delta * video, next_audio, shape)
        before, velocity = unpack_video(latents.video, shape), unpack_video(video, shape)
        later = before[:, :, 1:] + delta * velocity[:, :, 1:]
        return Latents(pack_video(torch.cat([before[:, :, :1], later], dim=2)), next_audio, shape)

    def _video_time(self, level: NoiseLevel, given: Tensor | None) -> Embedding:
        """Tokens of a given first frame are at noise level 0."""
        if given is None:
            assert level.video is not None
            return level.video
        timesteps = level.timestep.unsqueeze(-1) * (1 - given)
        return embed_video_timestep(self._transformer, timesteps, dtype=self._dtype)
