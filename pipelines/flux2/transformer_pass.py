"""`Flux2Transformer2DModel.forward` in parts, by how often each has to run.

Every part calls the model's own modules with the arguments that the model gives them, so that the
parts together have its bits, and what is mounted on a module works here too.

Shapes: B images, L text tokens, N image tokens (references included), J channels of prompt embeddings,
C channels of a token, D transformer width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Modulations:
    """What depends on the timestep alone; model dtype.

    embedding: (B, D) of time and guidance. image, text: (B, 6 D), of the double-stream blocks.
    single: (B, 3 D), of the single-stream blocks.
    """

    embedding: Tensor
    image: Tensor
    text: Tensor
    single: Tensor


@dataclass(frozen=True)
class Rope:
    """Rotary tables of text tokens, then image tokens: fp32 (L + N, head_dim)."""

    cos: Tensor
    sin: Tensor


def modulations(transformer: Any, timestep: Tensor, guidance: Tensor | None) -> Modulations:
    """Once for every timestep of a schedule.

    timestep: (B,), t / 1000 in model dtype; equal rows are not folded, for a product of another height
        may round differently. guidance: fp32 (B,), or `None` for models without the input.
    """
    embedding = transformer.time_guidance_embed(
        timestep * 1000, None if guidance is None else guidance.to(timestep.dtype) * 1000
    )
    return Modulations(
        embedding=embedding,
        image=transformer.double_stream_modulation_img(embedding),
        text=transformer.double_stream_modulation_txt(embedding),
        single=transformer.single_stream_modulation(embedding),
    )


def rope(transformer: Any, text_ids: Tensor, image_ids: Tensor) -> Rope:
    """Once for every shape. text_ids: int64 (L, 4). image_ids: int64 (N, 4), on the model's device."""
    text_cos, text_sin = transformer.pos_embed(text_ids)
    image_cos, image_sin = transformer.pos_embed(image_ids)
    return Rope(torch.cat([text_cos, image_cos]), torch.cat([text_sin, image_sin]))


def embed_context(transformer: Any, prompt_embeds: Tensor) -> Tensor:
    """Once for every request: (B, L, J) -> (B, L, D)."""
    context: Tensor = transformer.context_embedder(prompt_embeds)
    return context


def predict(
    transformer: Any, tokens: Tensor, context: Tensor, *, rope: Rope, modulations: Modulations
) -> Tensor:
    """Once for every step and prompt: tokens (B, N, C) and context (B, L, D) -> velocity (B, N, C)."""
    length = context.shape[1]
    tables = (rope.cos, rope.sin)
    hidden = transformer.x_embedder(tokens)
    for block in transformer.transformer_blocks:
        context, hidden = block(
            hidden_states=hidden,
            encoder_hidden_states=context,
            temb_mod_img=modulations.image,
            temb_mod_txt=modulations.text,
            image_rotary_emb=tables,
            joint_attention_kwargs=None,
        )
    hidden = torch.cat([context, hidden], dim=1)
    for block in transformer.single_transformer_blocks:
        hidden = block(
            hidden_states=hidden,
            encoder_hidden_states=None,
            temb_mod=modulations.single,
            image_rotary_emb=tables,
            joint_attention_kwargs=None,
        )
    hidden = transformer.norm_out(hidden[:, length:], modulations.embedding)
    velocity: Tensor = transformer.proj_out(hidden)
    return velocity
