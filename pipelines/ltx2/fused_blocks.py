"""The forward of LTX-2's transformer blocks that calls fusion sites.

It computes what diffusers' forward of the class does, with the residual of each sub-layer next to the
norm and modulations of the following one. Mount it with `accel.fusion.mounting.mount`.
Source: fusion spec sections 5.1 and 7, diffusers 0.42 `transformer_ltx2.py`.

Shapes: B rows, T tokens and D width of a modality, L text tokens, N rows of modulation: 1, or one a token.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    LTX2AudioVideoAttnProcessor,
    LTX2PerturbedAttnProcessor,
    LTX2VideoTransformerBlock,
    apply_split_rotary_emb,
)
from torch import Tensor, nn

from accel.fusion.mounting import BlockForward, Draw, minor_version
from pipelines.ltx2.fused_attention import Rope, attention, attention_refuses
from pipelines.ltx2.fused_layers import (
    Context,
    NoiseVectors,
    Stream,
    attend_to_self,
    attend_to_text,
    cross_modulation,
    feed_forward,
    modulated_text,
)
from pipelines.ltx2.known_structure import KNOWN


def transformer_block(
    block: Any,
    hidden_states: Tensor,
    audio_hidden_states: Tensor,
    encoder_hidden_states: Context,
    audio_encoder_hidden_states: Context,
    temb: NoiseVectors,
    temb_audio: NoiseVectors,
    temb_ca_scale_shift: NoiseVectors,
    temb_ca_audio_scale_shift: NoiseVectors,
    temb_ca_gate: NoiseVectors,
    temb_ca_audio_gate: NoiseVectors,
    temb_prompt: NoiseVectors | None = None,
    temb_prompt_audio: NoiseVectors | None = None,
    video_rotary_emb: Rope | None = None,
    audio_rotary_emb: Rope | None = None,
    ca_video_rotary_emb: Rope | None = None,
    ca_audio_rotary_emb: Rope | None = None,
    encoder_attention_mask: Tensor | None = None,
    audio_encoder_attention_mask: Tensor | None = None,
    self_attention_mask: Tensor | None = None,
    audio_self_attention_mask: Tensor | None = None,
    a2v_cross_attention_mask: Tensor | None = None,
    v2a_cross_attention_mask: Tensor | None = None,
    use_a2v_cross_attention: bool = True,
    use_v2a_cross_attention: bool = True,
    perturbation_mask: Tensor | None = None,
    all_perturbed: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Video and audio tokens, (B, T, D) each, and what they attend to -> the same.

    Keys and values of the text and sums with the block's tables pass through, as in the stock forward.
    temb, temb_audio: (B, N, 6 D), with modulated text attention (B, N, 9 D). temb_ca_*_scale_shift:
    (B, N, 4 D). temb_ca_*_gate: (B, N, D). temb_prompt*: (B, N, 2 D).
    """
    video, audio = Stream(hidden_states), Stream(audio_hidden_states)
    rows = hidden_states.shape[0]
    perturbation = (
        {"perturbation_mask": perturbation_mask, "all_perturbed": all_perturbed}
        if block.perturbed_attn
        else {}
    )
    video_modulation = block.get_mod_params(block.scale_shift_table, temb, rows)
    audio_modulation = block.get_mod_params(block.audio_scale_shift_table, temb_audio, rows)
    text, audio_text = encoder_hidden_states, audio_encoder_hidden_states
    if block.cross_attn_adaln:
        text = modulated_text(block, block.prompt_scale_shift_table, temb_prompt, text)
        audio_text = modulated_text(
            block, block.audio_prompt_scale_shift_table, temb_prompt_audio, audio_text
        )

    attend_to_self(
        video,
        block.norm1,
        block.attn1,
        video_modulation,
        rope=video_rotary_emb,
        mask=self_attention_mask,
        perturbation=perturbation,
    )
    attend_to_self(
        audio,
        block.audio_norm1,
        block.audio_attn1,
        audio_modulation,
        rope=audio_rotary_emb,
        mask=audio_self_attention_mask,
        perturbation=perturbation,
    )
    attend_to_text(video, block.norm2, block.attn2, video_modulation, text, encoder_attention_mask)
    attend_to_text(
        audio,
        block.audio_norm2,
        block.audio_attn2,
        audio_modulation,
        audio_text,
        audio_encoder_attention_mask,
    )
    if use_a2v_cross_attention or use_v2a_cross_attention:
        of_video = cross_modulation(
            block,
            block.video_a2v_cross_attn_scale_shift_table,
            temb_ca_scale_shift,
            temb_ca_gate,
            rows=rows,
        )
        of_audio = cross_modulation(
            block,
            block.audio_a2v_cross_attn_scale_shift_table,
            temb_ca_audio_scale_shift,
            temb_ca_audio_gate,
            rows=rows,
        )
        video_to_video, video_to_audio = video.normed(
            block.audio_to_video_norm, of_video.to_video, of_video.to_audio
        )
        audio_to_video, audio_to_audio = audio.normed(
            block.video_to_audio_norm, of_audio.to_video, of_audio.to_audio
        )
        if use_a2v_cross_attention:
            attended = attention(
                block.audio_to_video_attn,
                video_to_video,
                audio_to_video,
                rope=ca_video_rotary_emb,
                key_rope=ca_audio_rotary_emb,
                mask=a2v_cross_attention_mask,
            )
            video.add(attended, of_video.gate)
        if use_v2a_cross_attention:
            attended = attention(
                block.video_to_audio_attn,
                audio_to_audio,
                video_to_audio,
                rope=ca_audio_rotary_emb,
                key_rope=ca_video_rotary_emb,
                mask=v2a_cross_attention_mask,
            )
            audio.add(attended, of_audio.gate)
    return (
        feed_forward(video, block.norm3, block.ff, video_modulation),
        feed_forward(audio, block.audio_norm3, block.audio_ff, audio_modulation),
    )


_ATTENTIONS = ("attn1", "audio_attn1", "audio_to_video_attn", "video_to_audio_attn")
_NORMS = (
    "norm1",
    "norm2",
    "norm3",
    "audio_norm1",
    "audio_norm2",
    "audio_norm3",
    "audio_to_video_norm",
    "video_to_audio_norm",
)


def _refuses(block: Any) -> str:
    if any(getattr(block, norm).weight is not None for norm in _NORMS):
        return "a norm has a weight"
    refusals = ((name, attention_refuses(getattr(block, name))) for name in _ATTENTIONS)
    return next((f"{name}: {refusal}" for name, refusal in refusals if refusal), "")


def _examples(block: Any, draw: Draw) -> list[dict[str, Any]]:
    """Both modalities together, and each for itself."""
    rows, tokens, audio_tokens, text_tokens = 2, 5, 4, 3
    width, audio_width = block.attn1.query_dim, block.audio_attn1.query_dim

    def rope(attn: Any, tokens: int) -> Rope:
        angles = draw(rows, attn.heads, tokens, attn.head_dim // 2, dtype=torch.float32)
        return angles.cos(), angles.sin()

    together = {
        "hidden_states": draw(rows, tokens, width),
        "audio_hidden_states": draw(rows, audio_tokens, audio_width),
        "encoder_hidden_states": draw(rows, text_tokens, block.attn2.cross_attention_dim),
        "audio_encoder_hidden_states": draw(rows, text_tokens, block.audio_attn2.cross_attention_dim),
        "temb": draw(rows, 1, block.scale_shift_table.numel()),
        "temb_audio": draw(rows, 1, block.audio_scale_shift_table.numel()),
        "temb_ca_scale_shift": draw(rows, 1, 4 * width),
        "temb_ca_audio_scale_shift": draw(rows, 1, 4 * audio_width),
        "temb_ca_gate": draw(rows, 1, width),
        "temb_ca_audio_gate": draw(rows, 1, audio_width),
        "temb_prompt": draw(rows, 1, 2 * width),
        "temb_prompt_audio": draw(rows, 1, 2 * audio_width),
        "video_rotary_emb": rope(block.attn1, tokens),
        "audio_rotary_emb": rope(block.audio_attn1, audio_tokens),
        "ca_video_rotary_emb": rope(block.audio_to_video_attn, tokens),
        "ca_audio_rotary_emb": rope(block.video_to_audio_attn, audio_tokens),
        "encoder_attention_mask": draw(rows, 1, text_tokens),
    }
    return [together, {**together, "use_a2v_cross_attention": False, "use_v2a_cross_attention": False}]


_PROCESSORS = (LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor)
_ATTENTION_PARTS: dict[str, tuple[type, ...]] = {
    "": (LTX2Attention,),
    ".processor": _PROCESSORS,
    ".norm_q": (nn.RMSNorm,),
    ".norm_k": (nn.RMSNorm,),
}

TRANSFORMER_FORWARDS = (
    BlockForward(
        block=LTX2VideoTransformerBlock,
        forward=transformer_block,
        sites=frozenset(
            {
                "modulate",
                "gated_residual",
                "rms_norm_modulate",
                "residual_rms_norm_modulate",
                "qk_norm_split_rope",
            }
        ),
        parts={
            **{name: (RMSNorm,) for name in _NORMS},
            **{name + path: kinds for name in _ATTENTIONS for path, kinds in _ATTENTION_PARTS.items()},
        },
        functions=(apply_split_rotary_emb,),
        known=KNOWN.get(minor_version(diffusers.__version__), {}),
        refuses=_refuses,
        examples=_examples,
    ),
)
"""For an `LTX2VideoTransformer3DModel`."""
