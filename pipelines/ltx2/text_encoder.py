"""Gemma 3's language model as LTX-2 uses it: every hidden state, no logits (LTX-2 spec section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as the language model takes it; L tokens, padded on the left.

    input_ids: int64 (1, L). masks: layer type -> bool (1, 1, L, L), or `None` where causal attention needs
    none since nothing is padded. rope: layer type -> cos and sin, (1, L, head_dim), model dtype.
    """

    input_ids: Tensor
    masks: Mapping[str, Tensor | None]
    rope: Mapping[str, tuple[Tensor, Tensor]]


def rotary_tables(model: Any, length: int) -> dict[str, tuple[Tensor, Tensor]]:
    """`PromptTokens.rope` of L = `length` tokens, on the model's device.

    model: transformers' `Gemma3TextModel`.
    """
    like = torch.empty((1, length, 1), dtype=model.dtype, device=model.device)
    positions = torch.arange(length, device=model.device).unsqueeze(0)
    return {kind: model.rotary_emb(like, positions, kind) for kind in sorted(set(model.config.layer_types))}


def attention_masks(model: Any, attention_mask: Tensor) -> dict[str, Tensor | None]:
    """`PromptTokens.masks`, on the CPU, where reading what is padded waits for no device.

    model: transformers' `Gemma3TextModel`. attention_mask: int64 (1, L) on the CPU, 1 at real tokens.
    """
    like = torch.empty((*attention_mask.shape, 1), dtype=model.dtype, device="cpu")
    # By position: the parameter of the cache has changed its name between releases.
    masks = create_masks_for_generate(model.config, like, attention_mask, None, None)
    return {kind: masks[kind] for kind in sorted(masks)}


def hidden_states(model: Any, tokens: PromptTokens) -> Tensor:
    """(1, L, D * (N + 1)): the inputs of the N layers, then the normed output of the last, feature-major."""
    hidden = model.embed_tokens(tokens.input_ids)  # (1, L, D)
    states = [hidden]
    for layer, kind in zip(model.layers, model.config.layer_types, strict=True):
        hidden = layer(hidden, attention_mask=tokens.masks[kind], position_embeddings=tokens.rope[kind])
        states.append(hidden)
    states[-1] = model.norm(hidden)
    return torch.stack(states, dim=-1).flatten(2, 3)
