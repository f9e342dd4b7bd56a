"""Keys and values of the text, which no step of a request changes.

Every block projects the text into keys and values of its own, twice: for video and for audio. In LTX-2.0
nothing of that depends on the noise level. `text_keys` does it once, with the blocks' own layers on tensors
of the same shapes, so that the bits are equal. In LTX-2.3 every step modulates the text, which stays as it
is.
Source: fusion spec section 8.5, LTX-2 spec section 7.

Shapes: N blocks, B rows, L text tokens, H heads, d channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipelines.ltx2.guidance import Guidance
from pipelines.ltx2.text_attention import KeysAndValues, accepts_keys
from pipelines.ltx2.transformer_pass import Text, Transformer


@dataclass(frozen=True)
class ModalityKeys:
    """Of one modality in all blocks. keys, values: (N, B, L, H d). mask: additive, (B, H, 1, L)."""

    keys: Tensor
    values: Tensor
    mask: Tensor

    def of_block(self, index: int) -> KeysAndValues:
        return KeysAndValues(self.keys[index], self.values[index], self.mask)


@dataclass(frozen=True)
class TextKeys:
    """What the blocks attend to, in the place of `Text`.

    Of 48 blocks, 1,024 text tokens, widths of 4,096 and 2,048 and bf16 it takes 1.21 GB a row, and a graph
    holds as much again in its fixed inputs. A guided step has three rows: two with the negative prompt, one
    of the prompt alone.
    """

    video: ModalityKeys
    audio: ModalityKeys

    def of_block(self, index: int) -> dict[str, Any]:
        """As `Text.of_block`; keys and values come with their mask."""
        return {
            "encoder_hidden_states": self.video.of_block(index),
            "audio_encoder_hidden_states": self.audio.of_block(index),
        }


@dataclass(frozen=True)
class AttendedText:
    """As `stages.PromptText`. batch: of the pass with all rows. positive: of passes of the prompt alone."""

    batch: Text | TextKeys
    positive: Text | TextKeys


def has_positive_keys(guidance: Guidance, transformer: Transformer) -> bool:
    """Whether passes of the prompt alone get keys of their own, beside those of a larger batch.

    A perturbed pass is not worth them where the transformer has no perturbed attention: it has no effect
    then, and policies may leave it out.
    """
    perturbs = guidance.stg and transformer.config.perturbed_attn
    return guidance.text and bool(guidance.modality or perturbs)


def text_keys(transformer: Transformer, text: Text) -> Text | TextKeys:
    """Keys and values of the text, or the text itself where an attention does not take them.

    See `text_attention.accept_keys` for those that do.
    """
    blocks = transformer.transformer_blocks
    video, audio = [block.attn2 for block in blocks], [block.audio_attn2 for block in blocks]
    if not all(map(accepts_keys, (*video, *audio))):
        return text
    return TextKeys(_keys(video, text.video, text.mask), _keys(audio, text.audio, text.mask))


def _keys(attentions: Sequence[Any], text: Tensor, mask: Tensor) -> ModalityKeys:
    rows, length, _ = text.shape
    first = attentions[0]
    mask = first.prepare_attention_mask(mask, length, rows)
    return ModalityKeys(
        keys=torch.stack([attn.norm_k(attn.to_k(text)) for attn in attentions]),
        values=torch.stack([attn.to_v(text) for attn in attentions]),
        mask=mask.view(rows, first.heads, -1, length),
    )
