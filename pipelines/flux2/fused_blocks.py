"""Forwards of FLUX.2's transformer blocks that call fusion sites.

Each computes what diffusers' forward of the same class does, attention processor included, through the
block's own projections. Mount them with `accel.fusion.mounting.mount`.
Source: fusion spec sections 5.1 and 7, diffusers 0.42 `transformer_flux2.py`.

Shapes: B images, L text tokens, N image tokens, D width, H heads, d channels of a head.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux2 import (
    Flux2Attention,
    Flux2AttnProcessor,
    Flux2FeedForward,
    Flux2Modulation,
    Flux2ParallelSelfAttention,
    Flux2ParallelSelfAttnProcessor,
    Flux2SingleTransformerBlock,
    Flux2SwiGLU,
    Flux2TransformerBlock,
)
from torch import Tensor, nn

from accel.fusion import (
    gated_residual,
    joint_qk_norm_rope,
    layer_norm_modulate,
    residual_layer_norm_modulate,
    swiglu,
    swiglu_concat,
)
from accel.fusion.mounting import BlockForward, Draw, minor_version
from pipelines.flux2.known_structure import KNOWN

Rope = tuple[Tensor, Tensor]
"""cos and sin, fp32 (tokens, d), every angle twice."""

_FP16_MAX = 65504


def double_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod_img: Tensor,
    temb_mod_txt: Tensor,
    image_rotary_emb: Rope | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Image (B, N, D) and text (B, L, D), modulations (B, 6 D) each -> text and image."""
    if image_rotary_emb is None or joint_attention_kwargs:
        return NotImplemented
    image, text = hidden_states, encoder_hidden_states
    (shift, scale, gate), (mlp_shift, mlp_scale, mlp_gate) = Flux2Modulation.split(temb_mod_img, 2)
    (text_shift, text_scale, text_gate), (text_mlp_shift, text_mlp_scale, text_mlp_gate) = (
        Flux2Modulation.split(temb_mod_txt, 2)
    )
    attended, text_attended = _joint_attention(
        block.attn,
        layer_norm_modulate(image, shift, scale, eps=block.norm1.eps),
        layer_norm_modulate(text, text_shift, text_scale, eps=block.norm1_context.eps),
        image_rotary_emb,
    )
    image, normed = residual_layer_norm_modulate(
        image, gate, attended, None, mlp_shift, mlp_scale, eps=block.norm2.eps
    )
    image = gated_residual(image, mlp_gate, _feed_forward(block.ff, normed))
    text, normed = residual_layer_norm_modulate(
        text, text_gate, text_attended, None, text_mlp_shift, text_mlp_scale, eps=block.norm2_context.eps
    )
    text = gated_residual(text, text_mlp_gate, _feed_forward(block.ff_context, normed))
    return _clip_fp16(text), image


def single_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    temb_mod: Tensor,
    image_rotary_emb: Rope | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Any:
    """Text then image, (B, L + N, D), modulation (B, 3 D) -> the same, or text and image apart."""
    if image_rotary_emb is None or joint_attention_kwargs:
        return NotImplemented
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        hidden_states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    shift, scale, gate = Flux2Modulation.split(temb_mod, 1)[0]
    normed = layer_norm_modulate(hidden_states, shift, scale, eps=block.norm.eps)
    branch = _parallel_attention(block.attn, normed, image_rotary_emb)
    hidden_states = _clip_fp16(gated_residual(hidden_states, gate, branch))
    if split_hidden_states:
        return hidden_states[:, :text_seq_len], hidden_states[:, text_seq_len:]
    return hidden_states


def _joint_attention(attn: Any, image: Tensor, text: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Attention of image and text tokens to both -> image (B, N, D) and text (B, L, D)."""
    image_q, image_k, image_v = _heads(attn, attn.to_q(image), attn.to_k(image), attn.to_v(image))
    text_q, text_k, text_v = _heads(attn, attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text))
    q, k = joint_qk_norm_rope(
        image_q,
        image_k,
        attn.norm_q.weight,
        attn.norm_k.weight,
        *rope,
        eps=attn.norm_q.eps,
        first=(text_q, text_k, attn.norm_added_q.weight, attn.norm_added_k.weight),
    )
    attended = _attend(attn, q, k, torch.cat([text_v, image_v], dim=1))
    text, image = attended.split_with_sizes([text.shape[1], image.shape[1]], dim=1)
    project, dropout = attn.to_out
    return dropout(project(image)), attn.to_add_out(text)


def _parallel_attention(attn: Any, normed: Tensor, rope: Rope) -> Tensor:
    """Attention and feed-forward, which share both projections. normed: (B, L + N, D)."""
    packed = attn.to_qkv_mlp_proj(normed)
    qkv_width = 3 * attn.inner_dim
    # By ratio, not by size: of a sharded projection each rank holds a part.
    whole_width = qkv_width + attn.mlp_hidden_dim * attn.mlp_mult_factor
    split_at = packed.shape[-1] * qkv_width // whole_width
    q, k, v = _heads(attn, *packed[..., :split_at].chunk(3, dim=-1))
    q, k = joint_qk_norm_rope(q, k, attn.norm_q.weight, attn.norm_k.weight, *rope, eps=attn.norm_q.eps)
    output: Tensor = attn.to_out(swiglu_concat(_attend(attn, q, k, v), packed[..., split_at:]))
    return output


def _attend(attn: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v: (B, tokens, H, d). Returns (B, tokens, H d).

    v has the strides that the stock processor hands over: another layout may select another kernel.
    """
    processor = attn.processor
    attended = dispatch_attention_fn(
        q, k, v, backend=processor._attention_backend, parallel_config=processor._parallel_config
    )
    heads_joined: Tensor = attended.flatten(2, 3).to(q.dtype)
    return heads_joined


def _heads(attn: Any, *projections: Tensor) -> list[Tensor]:
    """(B, tokens, H d) -> (B, tokens, H, d) each."""
    return [torch.unflatten(projection, -1, (-1, attn.head_dim)) for projection in projections]


def _feed_forward(ff: Any, x: Tensor) -> Tensor:
    output: Tensor = ff.linear_out(swiglu(ff.linear_in(x)))
    return output


def _clip_fp16(x: Tensor) -> Tensor:
    return x.clip(-_FP16_MAX, _FP16_MAX) if x.dtype == torch.float16 else x


def _double_refuses(block: Any) -> str:
    attn = block.attn
    norms = (block.norm1, block.norm2, block.norm1_context, block.norm2_context)
    head_norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
    return _norms_refuse(norms, head_norms)


def _single_refuses(block: Any) -> str:
    return _norms_refuse((block.norm,), (block.attn.norm_q, block.attn.norm_k))


def _norms_refuse(norms: tuple[Any, ...], head_norms: tuple[Any, ...]) -> str:
    if any(norm.weight is not None for norm in norms):
        return "a LayerNorm has a weight"
    if any(norm.weight is None for norm in head_norms):
        return "a norm of queries or keys has no weight"
    return "" if len({norm.eps for norm in head_norms}) == 1 else "norms of queries and keys differ in eps"


def _double_examples(block: Any, draw: Draw) -> list[dict[str, Any]]:
    width = block.attn.query_dim
    return [
        {
            "hidden_states": draw(2, 5, width),
            "encoder_hidden_states": draw(2, 3, width),
            "temb_mod_img": draw(2, 6 * width),
            "temb_mod_txt": draw(2, 6 * width),
            "image_rotary_emb": _rope_example(block, draw, tokens=8),
        }
    ]


def _single_examples(block: Any, draw: Draw) -> list[dict[str, Any]]:
    width = block.attn.query_dim
    return [
        {
            "hidden_states": draw(2, 8, width),
            "encoder_hidden_states": None,
            "temb_mod": draw(2, 3 * width),
            "image_rotary_emb": _rope_example(block, draw, tokens=8),
        }
    ]


def _rope_example(block: Any, draw: Draw, *, tokens: int) -> Rope:
    angles = draw(tokens, block.attn.head_dim // 2, dtype=torch.float32).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


_KNOWN = KNOWN.get(minor_version(diffusers.__version__), {})
_LAYER_NORM, _HEAD_NORM, _SWIGLU = (nn.LayerNorm,), (nn.RMSNorm,), (Flux2SwiGLU,)

TRANSFORMER_FORWARDS = (
    BlockForward(
        block=Flux2TransformerBlock,
        forward=double_block,
        sites=frozenset(
            {
                "modulate",
                "gated_residual",
                "layer_norm_modulate",
                "residual_layer_norm_modulate",
                "joint_qk_norm_rope",
                "swiglu",
            }
        ),
        parts={
            "norm1": _LAYER_NORM,
            "norm1_context": _LAYER_NORM,
            "norm2": _LAYER_NORM,
            "norm2_context": _LAYER_NORM,
            "attn": (Flux2Attention,),
            "attn.processor": (Flux2AttnProcessor,),
            "attn.norm_q": _HEAD_NORM,
            "attn.norm_k": _HEAD_NORM,
            "attn.norm_added_q": _HEAD_NORM,
            "attn.norm_added_k": _HEAD_NORM,
            "ff": (Flux2FeedForward,),
            "ff.act_fn": _SWIGLU,
            "ff_context": (Flux2FeedForward,),
            "ff_context.act_fn": _SWIGLU,
        },
        functions=(apply_rotary_emb,),
        known=_KNOWN,
        refuses=_double_refuses,
        examples=_double_examples,
    ),
    BlockForward(
        block=Flux2SingleTransformerBlock,
        forward=single_block,
        sites=frozenset(
            {
                "modulate",
                "gated_residual",
                "layer_norm_modulate",
                "joint_qk_norm_rope",
                "swiglu",
                "swiglu_concat",
            }
        ),
        parts={
            "norm": _LAYER_NORM,
            "attn": (Flux2ParallelSelfAttention,),
            "attn.processor": (Flux2ParallelSelfAttnProcessor,),
            "attn.norm_q": _HEAD_NORM,
            "attn.norm_k": _HEAD_NORM,
            "attn.mlp_act_fn": _SWIGLU,
        },
        functions=(apply_rotary_emb,),
        known=_KNOWN,
        refuses=_single_refuses,
        examples=_single_examples,
    ),
)
"""For a `Flux2Transformer2DModel`."""
