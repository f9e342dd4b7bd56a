"""The denoising stage of FLUX 3 Action: a loop over network evaluations.

Shapes: L text tokens (a multiple of 80), V video tokens, C conditioning video tokens, K actions,
A action channels, D transformer width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from accel.fusion.savings import takes
from accel.loops import iterate
from accel.region import loop_body, region
from pipelines.flux3_action.policy_config import LATENT_CHANNELS, PolicyConfig
from pipelines.flux3_action.position_ids import pack_actions, pack_latents
from pipelines.flux3_action.request import ActionRequest
from pipelines.flux3_action.stages import FusionEpoch, TextTokens, TransformerStage
from pipelines.flux3_action.tables import (
    VIDEO,
    VIDEO_COND,
    DenoisingStep,
    StaticTables,
    StepTable,
    Targets,
    denoising_steps,
)
from pipelines.flux3_action.transformer import TEXT, ActionTransformer, Modulation, concat_modulations
from pipelines.host_threads import one_host_thread
from pipelines.progress import Progress
from pipelines.transfer import upload
from stages.guidance import combine
from stages.samplers import History, sampler_plan
from stages.stage import Field, State


@dataclass(frozen=True)
class Sample:
    """Both target streams between two steps. video: fp32 (1, V, 96). action: fp32 (1, K, A)."""

    video: Tensor
    action: Tensor
    video_history: History = field(default_factory=History)
    action_history: History = field(default_factory=History)


@dataclass(frozen=True)
class Conditioning:
    """What all steps of a request share. video_cond: (1, C, D). state_cond: (1, 1, D)."""

    text: TextTokens
    null_text: TextTokens | None
    video_cond: Tensor
    state_cond: Tensor


@dataclass(frozen=True)
class LastStep(DenoisingStep):
    """A step after which the video sample is thrown away.

    The annotation of the loop body names it, so that manifests can hold it.
    """


@dataclass(frozen=True)
class Start:
    """What a seed decides alone. sample: the noise. targets: after the mode blocks of the first step."""

    sample: Sample
    targets: Targets


class Denoising(TransformerStage):
    """Noise -> video latents (thrown away) and action targets, by flow matching."""

    name: ClassVar[str] = "denoising"
    reads: ClassVar[tuple[Field, ...]] = (
        Field("request"),
        Field("text"),
        Field("null_text"),
        Field("video_cond"),
        Field("state_cond"),
        Field("progress"),
    )
    writes: ClassVar[tuple[Field, ...]] = (
        Field("video_tokens", "(1, V, 96)", "fp32 final video sample"),
        Field("action_tokens", "(1, K, A)", "fp32 final action sample, scaled"),
    )
    # Plans kept: (sampler, steps, shift) choices are few, but a client may sweep them.
    max_plans: ClassVar[int] = 8
    # Starts kept, of 18 MB each in DROID shapes: a robot's requests have one seed as a rule.
    max_starts: ClassVar[int] = 4

    def __init__(
        self,
        *,
        config: PolicyConfig,
        transformer: ActionTransformer,
        tables: StaticTables,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config=config, transformer=transformer, tables=tables, device=device, dtype=dtype)
        self._fusion_epoch = FusionEpoch()
        self._plans = lru_cache(maxsize=self.max_plans)(self._compute_steps)
        self._starts = lru_cache(maxsize=self.max_starts)(self._compute_start)

    def forget(self) -> None:
        super().forget()
        self._plans.cache_clear()
        self._starts.cache_clear()

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        progress: Progress = state["progress"]
        conditioning = Conditioning(
            state["text"], state["null_text"], state["video_cond"], state["state_cond"]
        )
        progress.start("denoising", request.steps)
        first, *others = self.steps(request)
        start = self.start(request)
        sample = iterate(
            self.advance,
            start.sample,
            (replace(first, targets=start.targets), *others),
            conditioning,
            on_step=lambda: progress.advance("denoising"),
            guidance=(request.guidance_video, request.guidance_action),
        )
        progress.finish("denoising")
        state["video_tokens"] = sample.video
        state["action_tokens"] = sample.action

    def start(self, request: ActionRequest) -> Start:
        """Of the request's seed; kept, so not to be written to.

        The mode blocks of the target streams see neither observation nor caption (spec section 13).
        """
        if self._fusion_epoch.moved():
            self._starts.cache_clear()
        return self._starts(request.seed, request.sampler, request.steps, request.shift)

    def _compute_start(self, seed: int, sampler: str, steps: int, shift: float) -> Start:
        noise, table = self.noise(seed), self._plans(sampler, steps, shift)[0].table
        return Start(Sample(*noise), self.embed_targets(*noise, table.video.early, table.action.early))

    @region
    def embed_targets(
        self, video: Tensor, action: Tensor, video_early: Modulation, action_early: Modulation
    ) -> Targets:
        """fp32 samples -> hidden tokens, both passes' input."""
        return self._targets(video, action, video_early, action_early)

    def noise(self, seed: int) -> tuple[Tensor, Tensor]:
        """Draw on one CPU generator, video first (spec section 9): fp32 (1, V, 96) and (1, K, A)."""
        config = self._config
        generator = torch.Generator("cpu").manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(1, *shape, generator=generator, dtype=torch.float32, device="cpu")

        with one_host_thread():  # the device meanwhile works on the stages before
            video = pack_latents(draw(LATENT_CHANNELS, config.latent_frames, *config.latent_hw))
            action = pack_actions(draw(config.action_dim, config.chunk_size))
            return upload(video, self._device), upload(action, self._device)

    def steps(self, request: ActionRequest) -> tuple[DenoisingStep, ...]:
        """The inputs of every step of a request; kept, so not to be written to.

        The last one is told apart only where that can matter: another type of step is another graph.
        """
        steps = self._plans(request.sampler, request.steps, request.shift)
        if not (request.guided and request.guidance_action == 1.0):
            return steps
        return (*steps[:-1], LastStep(steps[-1].table, steps[-1].solver))

    def _compute_steps(self, sampler: str, steps: int, shift: float) -> tuple[DenoisingStep, ...]:
        plan = sampler_plan(sampler, steps=steps, shift=shift)
        return denoising_steps(self._transformer, self._config.action_stream, plan, device=self._device)

    @loop_body("whole")
    def advance(
        self,
        carry: Sample,
        step: DenoisingStep | LastStep,
        shared: Conditioning,
        *,
        guidance: tuple[float, float],
    ) -> Sample:
        """One step of both streams. guidance: scales of video and action."""
        if shared.null_text is not None and self._skips_null_text(step, guidance[1]):
            shared = replace(shared, null_text=None)
        video, action = self.velocity(carry, shared, step, guidance=guidance)
        next_video, video_history = step.solver(carry.video, video, carry.video_history)
        next_action, action_history = step.solver(carry.action, action, carry.action_history)
        return Sample(next_video, next_action, video_history, action_history)

    def _skips_null_text(self, step: DenoisingStep, guidance_action: float) -> bool:
        """Whether to leave out a pass that serves nothing but a video sample that is thrown away."""
        if guidance_action != 1.0:
            return takes("skip_unused_guidance", unless=f"the action is guided at scale {guidance_action:g}")
        return isinstance(step, LastStep) and takes("skip_unused_guidance")

    def velocity(
        self,
        sample: Sample,
        conditioning: Conditioning,
        step: DenoisingStep,
        *,
        guidance: tuple[float, float],
    ) -> tuple[Tensor, Tensor]:
        """One network evaluation with guidance: fp32 velocities of video and action, shaped like them."""
        table = step.table
        targets = step.targets or self._targets(
            sample.video, sample.action, table.video.early, table.action.early
        )
        streams = self.streams(targets, conditioning)
        text, null_text = conditioning.text, conditioning.null_text
        if null_text is None:
            video_velocity, action_velocity = self.joint_pass(text, streams, table)
            return video_velocity.float(), action_velocity.float()
        conditional, unconditional = self.guided_passes(text, null_text, streams, table)
        return (
            combine(unconditional[0], conditional[0], guidance[0]).float(),
            combine(unconditional[1], conditional[1], guidance[1]).float(),
        )

    def streams(self, targets: Targets, conditioning: Conditioning) -> list[Tensor]:
        """Hidden tokens (1, *, D) of the four streams in stream order."""
        return [targets.video, conditioning.video_cond, targets.action, conditioning.state_cond]

    def _targets(
        self, video: Tensor, action: Tensor, video_early: Modulation, action_early: Modulation
    ) -> Targets:
        embed, tables = self._transformer.embed_stream, self._tables
        return Targets(
            embed(VIDEO, video.to(self._dtype), video_early, tables.rope(VIDEO)),
            embed(tables.action, action.to(self._dtype), action_early, tables.rope(tables.action)),
        )

    def guided_passes(
        self, text: TextTokens, null_text: TextTokens, streams: list[Tensor], table: StepTable
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """`joint_pass` with the caption and with the empty one; as one batch where that is allowed."""
        length, null_length = text.tokens.shape[1], null_text.tokens.shape[1]
        unequal = f"captions of {length} and {null_length} tokens" if length != null_length else ""
        if not takes("batched_guidance", unless=unequal):
            return self.joint_pass(text, streams, table), self.joint_pass(null_text, streams, table)
        # Captions of one length have equal rotary tables.
        both = TextTokens(torch.cat([text.tokens, null_text.tokens]), text.rope)
        video, action = self.joint_pass(both, [stream.expand(2, -1, -1) for stream in streams], table)
        conditional, unconditional = zip(video.chunk(2), action.chunk(2), strict=True)
        return conditional, unconditional

    def joint_pass(self, text: TextTokens, streams: list[Tensor], table: StepTable) -> tuple[Tensor, Tensor]:
        """28 joint blocks and the two heads that are read: model-dtype velocities.

        text, streams: B rows each; every other input serves all rows.
        """
        transformer, tables = self._transformer, self._tables
        segments = [text.tokens, *streams]
        lengths = [segment.shape[1] for segment in segments]
        modulation = concat_modulations(
            [
                tables.joint(TEXT),
                table.video.joint,
                tables.joint(VIDEO_COND),
                table.action.joint,
                tables.joint(tables.state),
            ],
            lengths,
        )
        rope = torch.cat(
            [text.rope, *(tables.rope(s) for s in (VIDEO, VIDEO_COND, tables.action, tables.state))], dim=1
        )
        hidden = transformer.joint(torch.cat(segments, dim=1), modulation, rope)
        _, video, _, action, _ = torch.split(hidden, lengths, dim=1)
        return (
            transformer.head(VIDEO, video, table.video.final_shift, table.video.final_scale),
            transformer.head(tables.action, action, table.action.final_shift, table.action.final_scale),
        )
