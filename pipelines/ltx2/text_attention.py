"""Text attention that is given the keys and values of the text instead of the text.

Source: fusion spec sections 7 and 8.5, diffusers 0.42 `transformer_ltx2.py`.
Shapes: B rows, T tokens and D width of a modality, L text tokens, H heads, d channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AudioVideoAttnProcessor,
    LTX2PerturbedAttnProcessor,
)
from torch import Tensor

from pipelines.ltx2.fused_attention import Rope, attend


@dataclass(frozen=True)
class KeysAndValues:
    """What one attention makes of the text.

    keys: after their norm, (B, L, H d). values: (B, L, H d). mask: additive, one a head, (B, H, 1, L).
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


class TextAttnProcessor(LTX2PerturbedAttnProcessor):  # type: ignore[misc]
    """The library's processor, which also takes `KeysAndValues` as what to attend to.

    Called without a perturbation it does what `LTX2AudioVideoAttnProcessor` does, so it replaces both.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | KeysAndValues | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: Rope | None = None,
        key_rotary_emb: Rope | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: bool | None = None,
    ) -> Tensor:
        """hidden_states: (B, T, D). Keys and values come with their mask and without rotary embedding."""
        if isinstance(encoder_hidden_states, KeysAndValues):
            text = encoder_hidden_states
            q = attn.norm_q(attn.to_q(hidden_states))
            return attend(attn, hidden_states, q, text.keys, text.values, mask=text.mask)
        attended: Tensor = super().__call__(
            attn,
            hidden_states,
            encoder_hidden_states,
            attention_mask,
            query_rotary_emb,
            key_rotary_emb,
            perturbation_mask,
            all_perturbed,
        )
        return attended


def accept_keys(transformer: Any) -> None:
    """Let the text attentions take `KeysAndValues`, where noise does not modulate the text.

    The attention backend stays the chosen one, and so does a processor that is not the library's own.
    """
    for block in transformer.transformer_blocks:
        if not block.cross_attn_adaln:
            for attn in (block.attn2, block.audio_attn2):
                _accept(attn)


def accepts_keys(attn: Any) -> bool:
    """Whether the attention takes `KeysAndValues`."""
    return isinstance(attn.processor, TextAttnProcessor)


def _accept(attn: Any) -> None:
    stock = attn.processor
    if type(stock) in (LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor):
        processor = TextAttnProcessor()
        processor._attention_backend = stock._attention_backend
        processor._parallel_config = stock._parallel_config
        attn.set_processor(processor)
