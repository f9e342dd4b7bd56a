"""The stages of FLUX 3 Action, in order.

Shapes: L text tokens (a multiple of 80), V video tokens, C conditioning video tokens, K actions,
A action channels, D transformer width.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from accel.region import region
from pipelines.flux3_action.action_space import actions_from_targets, state_token
from pipelines.flux3_action.canvas import compose_canvas
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.position_ids import pack_actions, pack_latents
from pipelines.flux3_action.request import ActionRequest
from pipelines.flux3_action.tables import TEXT, VIDEO, VIDEO_COND, StaticTables, StepTable, step_tables
from pipelines.flux3_action.text_encoder import CaptionEncoder
from pipelines.flux3_action.tokenizer import CaptionTokenizer
from pipelines.flux3_action.transformer import ActionTransformer, concat_modulations
from pipelines.flux3_action.video_vae import VideoEncoder
from pipelines.progress import Progress
from stages.guidance import combine
from stages.samplers import SamplerPlan, sampler_plan
from stages.stage import Field, Stage, State
from stages.text_encoding import CaptionCache

_log = logging.getLogger("samebit")


@dataclass(frozen=True)
class TextTokens:
    """A caption after the text encoder and the text mode blocks.

    tokens: (1, L, D), model dtype. rope: fp32 (1, L, head_dim).
    """

    tokens: Tensor
    rope: Tensor


class TextEncoding(Stage):
    """Prompt and, with guidance, the empty caption -> joint-ready text tokens. Cached per caption."""

    name: ClassVar[str] = "text_encoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"),)
    writes: ClassVar[tuple[Field, ...]] = (
        Field("text", "(1, L, D)", "tokens of the prompt"),
        Field("null_text", "(1, L, D)", "tokens of the empty caption, or None without guidance"),
    )

    def __init__(
        self,
        *,
        tokenizer: CaptionTokenizer,
        encoder: CaptionEncoder,
        transformer: ActionTransformer,
        tables: StaticTables,
        device: torch.device,
        cache_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._transformer = transformer
        self._tables = tables
        self._device = device
        self.cache: CaptionCache[TextTokens] = CaptionCache(token_budget=cache_tokens)

    def modules(self) -> Mapping[str, nn.Module]:
        return {
            "text_encoder": self._encoder,
            "transformer": self._transformer,
            "tables": self._tables,
        }

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        state["text"] = self._caption(request.observation.prompt)
        state["null_text"] = self._caption("") if request.guided else None

    def _caption(self, caption: str) -> TextTokens:
        cached = self.cache.get(caption)
        if cached is not None:
            return cached
        tokenized = self._tokenizer.encode(caption)
        if tokenized.truncated:
            _log.warning("prompt: longer than the text encoder takes; only its beginning is used.")
        length = tokenized.input_ids.shape[1]
        context = self.encode(
            tokenized.input_ids.to(self._device),
            *self._encoder.prepare(tokenized.n_tokens, length, device=self._device),
        )
        rope = self._tables.text_rope(length)
        text = TextTokens(tokens=self.project(context, rope), rope=rope)
        self.cache.put(caption, text, tokens=length)
        return text

    @region
    def encode(self, input_ids: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Language model, layers in use: (1, L) ids -> (1, L, context_in_dim)."""
        context: Tensor = self._encoder(input_ids, mask, cos, sin)
        return context

    @region
    def project(self, context: Tensor, rope: Tensor) -> Tensor:
        """Input projection and text mode blocks: -> (1, L, D)."""
        return self._transformer.embed_text(context, self._tables.early(TEXT), rope)


class Vae(Stage):
    """Camera images -> canvas -> normalised latent of the observed frame."""

    name: ClassVar[str] = "vae"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"),)
    writes: ClassVar[tuple[Field, ...]] = (
        Field("canvas", "(3, Hc, Wc)", "fp32 on the CPU, [-1, 1]"),
        Field("latent_tokens", "(1, C, 96)", "normalised latents, row-major"),
    )

    def __init__(
        self, *, config: PolicyConfig, vae: VideoEncoder, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._vae = vae
        self._device = device
        self._dtype = dtype

    def modules(self) -> Mapping[str, nn.Module]:
        return {"vae": self._vae}

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        canvas = compose_canvas(request.observation.images, self._config)
        state["canvas"] = canvas
        self._vae.prepare((1, *canvas.shape[1:]))
        # The cast happens on the CPU: the bf16 pixels do not depend on the device.
        pixels = canvas.to(self._dtype)[None, :, None].to(self._device)
        state["latent_tokens"] = self.encode(pixels)

    @region
    def encode(self, pixels: Tensor) -> Tensor:
        """(1, 3, 1, Hc, Wc) in [-1, 1] -> (1, C, 96), cropped to the latent grid that is kept."""
        height, width = self._config.latent_hw
        latent = self._vae.encode(pixels)
        return pack_latents(latent[..., :height, :width])


class ObservationEncoding(Stage):
    """Latent and robot state -> the two conditioning streams, through their mode blocks."""

    name: ClassVar[str] = "observation_encoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"), Field("latent_tokens"))
    writes: ClassVar[tuple[Field, ...]] = (
        Field("video_cond", "(1, C, D)", "hidden tokens of the observed frame"),
        Field("state_cond", "(1, 1, D)", "hidden token of the robot state"),
    )

    def __init__(
        self,
        *,
        config: PolicyConfig,
        transformer: ActionTransformer,
        tables: StaticTables,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._transformer = transformer
        self._tables = tables
        self._device = device
        self._dtype = dtype

    def modules(self) -> Mapping[str, nn.Module]:
        return {"transformer": self._transformer, "tables": self._tables}

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        token = state_token(request.observation.state, self._config).to(self._dtype).to(self._device)
        state["video_cond"], state["state_cond"] = self.condition(state["latent_tokens"], token)

    @region
    def condition(self, latent_tokens: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """(1, C, 96) and (1, 1, A) -> (1, C, D) and (1, 1, D)."""
        return (
            self._embed(VIDEO_COND, latent_tokens),
            self._embed(self._tables.state, token),
        )

    def _embed(self, stream: str, tokens: Tensor) -> Tensor:
        return self._transformer.embed_stream(
            stream, tokens, self._tables.early(stream), self._tables.rope(stream)
        )


class Denoising(Stage):
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
    _max_plans: ClassVar[int] = 8

    def __init__(
        self,
        *,
        config: PolicyConfig,
        transformer: ActionTransformer,
        tables: StaticTables,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._transformer = transformer
        self._tables = tables
        self._device = device
        self._dtype = dtype
        self._plans: dict[tuple[str, int, float], tuple[SamplerPlan, tuple[StepTable, ...]]] = {}

    def modules(self) -> Mapping[str, nn.Module]:
        return {"transformer": self._transformer, "tables": self._tables}

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        progress: Progress = state["progress"]
        plan, tables = self._plan(request)
        video, action = self.noise(request.seed)
        video_history, action_history = plan.initial_history(), plan.initial_history()
        progress.start("denoising", request.steps)
        for index, table in enumerate(tables):
            video_velocity, action_velocity = self.velocity(
                video,
                action,
                state["text"],
                state["null_text"],
                state["video_cond"],
                state["state_cond"],
                table,
                guidance=(request.guidance_video, request.guidance_action),
            )
            video, video_history = plan.step(index, video, video_velocity, video_history)
            action, action_history = plan.step(index, action, action_velocity, action_history)
            progress.advance("denoising")
        progress.finish("denoising")
        state["video_tokens"] = video
        state["action_tokens"] = action

    def noise(self, seed: int) -> tuple[Tensor, Tensor]:
        """Draw on one CPU generator, video first (spec section 9): fp32 (1, V, 96) and (1, K, A)."""
        config = self._config
        generator = torch.Generator().manual_seed(seed)
        channels = config.transformer.in_channels[VIDEO]
        video = torch.randn(1, channels, config.latent_frames, *config.latent_hw, generator=generator)
        action = torch.randn(1, config.action_dim, config.chunk_size, generator=generator)
        return pack_latents(video).to(self._device), pack_actions(action).to(self._device)

    @region
    def velocity(
        self,
        video: Tensor,
        action: Tensor,
        text: TextTokens,
        null_text: TextTokens | None,
        video_cond: Tensor,
        state_cond: Tensor,
        table: StepTable,
        *,
        guidance: tuple[float, float],
    ) -> tuple[Tensor, Tensor]:
        """One network evaluation with guidance: fp32 velocities shaped like `video` and `action`."""
        transformer, tables = self._transformer, self._tables
        streams = [
            transformer.embed_stream(VIDEO, video.to(self._dtype), table.video.early, tables.rope(VIDEO)),
            video_cond,
            transformer.embed_stream(
                tables.action, action.to(self._dtype), table.action.early, tables.rope(tables.action)
            ),
            state_cond,
        ]
        conditional = self._joint_pass(text, streams, table)
        if null_text is None:
            return conditional[0].float(), conditional[1].float()
        unconditional = self._joint_pass(null_text, streams, table)
        return (
            combine(unconditional[0], conditional[0], guidance[0]).float(),
            combine(unconditional[1], conditional[1], guidance[1]).float(),
        )

    def _joint_pass(self, text: TextTokens, streams: list[Tensor], table: StepTable) -> tuple[Tensor, Tensor]:
        """28 joint blocks and the two heads that are read: model-dtype velocities."""
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

    def _plan(self, request: ActionRequest) -> tuple[SamplerPlan, tuple[StepTable, ...]]:
        key = (request.sampler, request.steps, request.shift)
        if key not in self._plans:
            plan = sampler_plan(request.sampler, steps=request.steps, shift=request.shift)
            tables = step_tables(
                self._transformer, self._config.action_stream, plan.times, device=self._device
            )
            if len(self._plans) >= self._max_plans:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = (plan, tables)
        return self._plans[key]


class ActionDecoding(Stage):
    """Action sample -> actions in dataset units, on the CPU."""

    name: ClassVar[str] = "action_decoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"), Field("action_tokens"))
    writes: ClassVar[tuple[Field, ...]] = (
        Field("actions", "(horizon, A)", "fp32 on the CPU, dataset units"),
    )

    def __init__(self, *, config: PolicyConfig) -> None:
        self._config = config

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        targets = state["action_tokens"][0].cpu()
        actions = actions_from_targets(targets, request.observation.state, self._config)
        state["actions"] = actions[: request.horizon]
