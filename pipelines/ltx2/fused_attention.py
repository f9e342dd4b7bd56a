"""Attention of LTX-2 with one fusion site for the norms and rotary embeddings of queries and keys.

Source: fusion spec sections 2 and 5.1, diffusers 0.42 `transformer_ltx2.py`.
Shapes: B rows, T tokens and D width of a modality, H heads, d channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from accel.fusion import qk_norm_split_rope

Rope = tuple[Tensor, Tensor]
"""cos and sin, fp32 (B, H, T, d / 2)."""


def attention(
    attn: Any,
    tokens: Tensor,
    context: Tensor | None = None,
    *,
    rope: Rope | None,
    key_rope: Rope | None = None,
    mask: Tensor | None,
    perturbation: Mapping[str, Any] | None = None,
) -> Tensor:
    """Attention of tokens (B, T, D) to the context, by default to themselves.

    Perturbed or without rotary embedding it is the module's own.
    """
    perturbation = perturbation or {}
    if rope is None or any(value is not None and value is not False for value in perturbation.values()):
        unfused: Tensor = attn(
            tokens,
            encoder_hidden_states=context,
            attention_mask=mask,
            query_rotary_emb=rope,
            key_rotary_emb=key_rope,
            **perturbation,
        )
        return unfused
    context = tokens if context is None else context
    batch, length, _ = context.shape
    if mask is not None:
        mask = attn.prepare_attention_mask(mask, length, batch)
        mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
    q, k = qk_norm_split_rope(
        attn.to_q(tokens),
        attn.to_k(context),
        attn.norm_q.weight,
        attn.norm_k.weight,
        *rope,
        *(key_rope or ()),
        eps=attn.norm_q.eps,
    )
    return attend(attn, tokens, q, k, attn.to_v(context), mask=mask)


def attend(attn: Any, tokens: Tensor, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None) -> Tensor:
    """What follows the projections, norms and rotary embeddings of queries, keys and values: (B, T, D).

    tokens: (B, T, D), which the gates depend on. q: (B, T, H d). k, v: (B, L, H d), of L tokens. mask:
    additive, (B, H, 1 or T, L).
    """
    q, k, v = (_heads(attn, part) for part in (q, k, v))
    processor = attn.processor
    attended = dispatch_attention_fn(
        q,
        k,
        v,
        attn_mask=mask,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
    )
    attended = attended.flatten(2, 3).to(q.dtype)
    if attn.to_gate_logits is not None:
        gates = 2.0 * torch.sigmoid(attn.to_gate_logits(tokens))  # (B, T, H)
        attended = (_heads(attn, attended) * gates.unsqueeze(-1)).flatten(2, 3)
    project, dropout = attn.to_out
    output: Tensor = dropout(project(attended))
    return output


def _heads(attn: Any, projection: Tensor) -> Tensor:
    """(B, T, H d) -> (B, T, H, d)."""
    return torch.unflatten(projection, 2, (attn.heads, -1))


def attention_refuses(attn: Any) -> str:
    """What about an attention module `attention` does not cover, in words; empty if it covers it."""
    if attn.rope_type != "split":
        return f"its rotary embedding is {attn.rope_type}, not split"
    if attn.norm_q.weight is None or attn.norm_k.weight is None:
        return "a norm of queries or keys has no weight"
    return "" if attn.norm_q.eps == attn.norm_k.eps else "norms of queries and keys differ in eps"
