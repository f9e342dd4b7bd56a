"""A forward pass of the LTX-2 transformer, split into what steps share and what every step computes.

`LTX2VideoTransformer3DModel.forward` computes rotary tables, caption projections, masks and timestep
embeddings anew in every pass. Here each is a function of its own, called where its inputs become known, and
`transformer_pass` does the rest: input projections, blocks, output layers. Put together they run the
operations of the library's forward on tensors of the same shapes, so that the bits are equal.
Source: LTX-2 spec sections 5 and 7, diffusers 0.42 `transformer_ltx2.py`.

Shapes: B rows (two a video with classifier-free guidance), V video tokens, A audio tokens, L text tokens,
Dv and Da widths of the two modalities, Nv and Na rows of their timesteps: 1, or one a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipelines.ltx2.block_modulation import block_arguments
from pipelines.ltx2.latent_shapes import LatentShape

Transformer = Any
"""diffusers' `LTX2VideoTransformer3DModel`."""

Rope = tuple[Tensor, Tensor]
"""cos and sin, fp32; (B, heads, tokens, head_dim / 2) for the "split" layout."""

MASKED = -10000.0
"""What the library adds to the attention scores of padding."""


@dataclass(frozen=True)
class RotaryTables:
    """Rotary tables of both modalities, for self-attention and for attention to the other one."""

    video: Rope
    audio: Rope
    video_cross: Rope
    audio_cross: Rope

    def first(self, rows: int) -> RotaryTables:
        """The tables of the first `rows` rows."""
        return RotaryTables(
            *(
                (cos[:rows], sin[:rows])
                for cos, sin in (self.video, self.audio, self.video_cross, self.audio_cross)
            )
        )


@dataclass(frozen=True)
class Text:
    """What the blocks attend to. video: (B, L, Dv). audio: (B, L, Da). mask: additive, (B, 1, L)."""

    video: Tensor
    audio: Tensor
    mask: Tensor

    def of_block(self, index: int) -> dict[str, Any]:
        """Arguments of a block; all attend to the same."""
        return {
            "encoder_hidden_states": self.video,
            "audio_encoder_hidden_states": self.audio,
            "encoder_attention_mask": self.mask,
            "audio_encoder_attention_mask": self.mask,
        }


class BlockText(Protocol):
    """Text in the form that blocks take it: `Text`, or `text_keys.TextKeys`."""

    def of_block(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Embedding:
    """One timestep embedder's answer. modulation: (B, N, k D). embedded: (B, N, D)."""

    modulation: Tensor
    embedded: Tensor


@dataclass(frozen=True)
class Modulation:
    """Everything that depends on the noise level of the audio, which is the step's own: N is 1.

    scale_shift_*, gate_*: of the attention between the modalities. prompt_*: of the text, (B, 1, 2 D), in
    LTX-2.3; `None` in LTX-2.0.
    """

    audio: Embedding
    video_scale_shift: Tensor
    audio_scale_shift: Tensor
    video_gate: Tensor
    audio_gate: Tensor
    video_prompt: Tensor | None
    audio_prompt: Tensor | None


def clip_tables(
    transformer: Transformer, shape: LatentShape, *, fps: float, rows: int, device: torch.device
) -> RotaryTables:
    """Rotary tables of a clip at `fps` frames a second, on the device."""
    video = transformer.rope.prepare_video_coords(
        rows, shape.frames, shape.height, shape.width, device, fps=fps
    )
    audio = transformer.audio_rope.prepare_audio_coords(rows, shape.audio_frames, device)
    return rotary_tables(transformer, video, audio)


def rotary_tables(transformer: Transformer, video_coords: Tensor, audio_coords: Tensor) -> RotaryTables:
    """Rotary tables on the device of the coordinates.

    video_coords: fp32 (B, 3, V, 2), start and end of each token in seconds and pixels. audio_coords: fp32
    (B, 1, A, 2), in seconds.
    """
    return RotaryTables(
        video=transformer.rope(video_coords, device=video_coords.device),
        audio=transformer.audio_rope(audio_coords, device=audio_coords.device),
        video_cross=transformer.cross_attn_rope(video_coords[:, 0:1, :], device=video_coords.device),
        audio_cross=transformer.cross_attn_audio_rope(audio_coords[:, 0:1, :], device=audio_coords.device),
    )


def project_text(transformer: Transformer, video: Tensor, audio: Tensor, mask: Tensor) -> Text:
    """Connector outputs (B, L, *) and their mask, (B, L), 1 where a token counts -> what blocks take."""
    if transformer.config.use_prompt_embeddings:
        rows = video.shape[0]
        video = transformer.caption_projection(video).view(rows, -1, transformer.proj_in.out_features)
        audio = transformer.audio_caption_projection(audio).view(
            rows, -1, transformer.audio_proj_in.out_features
        )
    additive = (1 - mask.to(video.dtype)) * MASKED
    return Text(video, audio, additive.unsqueeze(1))


def embed_video_timestep(transformer: Transformer, timestep: Tensor, *, dtype: torch.dtype) -> Embedding:
    """fp32 timesteps, 0..1000, (B,) or one a token (B, V) -> modulation of the video tokens."""
    return _embed(transformer.time_embed, timestep, dtype)


def embed_timestep(transformer: Transformer, timestep: Tensor, *, dtype: torch.dtype) -> Modulation:
    """fp32 timesteps of the step, 0..1000, (B,) -> everything else that depends on the noise level.

    Each modality's attention to the other is modulated by the other's noise level, as `use_cross_timestep`
    asks for; both modalities are always at the same one.
    """
    config = transformer.config
    gate_timestep = timestep * (
        config.cross_attn_timestep_scale_multiplier / config.timestep_scale_multiplier
    )
    has_prompt = transformer.prompt_modulation and config.use_prompt_adaln_single

    def modulation(embedder: Any, timestep: Tensor) -> Tensor:
        return _embed(embedder, timestep, dtype).modulation

    return Modulation(
        audio=_embed(transformer.audio_time_embed, timestep, dtype),
        video_scale_shift=modulation(transformer.av_cross_attn_video_scale_shift, timestep),
        audio_scale_shift=modulation(transformer.av_cross_attn_audio_scale_shift, timestep),
        video_gate=modulation(transformer.av_cross_attn_video_a2v_gate, gate_timestep),
        audio_gate=modulation(transformer.av_cross_attn_audio_v2a_gate, gate_timestep),
        video_prompt=modulation(transformer.prompt_adaln, timestep) if has_prompt else None,
        audio_prompt=modulation(transformer.audio_prompt_adaln, timestep) if has_prompt else None,
    )


def transformer_pass(
    transformer: Transformer,
    video: Tensor,
    audio: Tensor,
    *,
    text: BlockText,
    rope: RotaryTables,
    video_time: Embedding,
    modulation: Modulation,
    isolated: bool = False,
    perturbed: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Velocities of both modalities, (B, V, C) and (B, A, C), in the model's dtype.

    video, audio: noisy latents, (B, V, C) and (B, A, C), in the model's dtype.
    isolated: without attention between the modalities. perturbed: blocks whose self-attention hands its
    values through (spatio-temporal guidance); without effect in a model built with `perturbed_attn=False`.
    """
    video, audio = transformer.proj_in(video), transformer.audio_proj_in(audio)
    blocks = transformer.transformer_blocks
    noise_level = block_arguments(
        blocks,
        {
            "temb": video_time.modulation,
            "temb_audio": modulation.audio.modulation,
            "temb_ca_scale_shift": modulation.video_scale_shift,
            "temb_ca_audio_scale_shift": modulation.audio_scale_shift,
            "temb_ca_gate": modulation.video_gate,
            "temb_ca_audio_gate": modulation.audio_gate,
            "temb_prompt": modulation.video_prompt,
            "temb_prompt_audio": modulation.audio_prompt,
        },
    )
    for index, (block, of_block) in enumerate(zip(blocks, noise_level, strict=True)):
        video, audio = block(
            hidden_states=video,
            audio_hidden_states=audio,
            **text.of_block(index),
            **of_block,
            video_rotary_emb=rope.video,
            audio_rotary_emb=rope.audio,
            ca_video_rotary_emb=rope.video_cross,
            ca_audio_rotary_emb=rope.audio_cross,
            use_a2v_cross_attention=not isolated,
            use_v2a_cross_attention=not isolated,
            perturbation_mask=None,
            all_perturbed=index in perturbed,
        )
    video = _modulated(transformer.norm_out(video), transformer.scale_shift_table, video_time)
    audio = _modulated(
        transformer.audio_norm_out(audio), transformer.audio_scale_shift_table, modulation.audio
    )
    return transformer.proj_out(video), transformer.audio_proj_out(audio)


def _embed(embedder: Any, timestep: Tensor, dtype: torch.dtype) -> Embedding:
    rows = timestep.shape[0]
    modulation, embedded = embedder(timestep.flatten(), batch_size=rows, hidden_dtype=dtype)
    return Embedding(
        modulation.view(rows, -1, modulation.shape[-1]), embedded.view(rows, -1, embedded.shape[-1])
    )


def _modulated(normed: Tensor, table: Tensor, time: Embedding) -> Tensor:
    """table: learned shift and scale, (2, D)."""
    values = table[None, None] + time.embedded[:, :, None]
    shift, scale = values[:, :, 0], values[:, :, 1]
    return normed * (1 + scale) + shift
