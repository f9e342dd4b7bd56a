"""The sub-layers of an LTX-2 transformer block, each ending with a residual that waits for the next norm.

Source: fusion spec section 5.1, diffusers 0.42 `transformer_ltx2.py`.
Shapes: B rows, T tokens and D width of a modality, L text tokens, N rows of modulation: 1, or one a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel.fusion import gated_residual, modulate, residual_rms_norm_modulate, rms_norm_modulate
from pipelines.ltx2.fused_attention import Rope, attention

Context = Any
"""What a text attention is given: text (B, L, D), or `text_attention.KeysAndValues`."""

NoiseVectors = Any
"""What a block adds a table to: (B, N, n D), or `block_modulation.TableSum`, to which it is added."""


class Stream:
    """The tokens of one modality on their way through a block, (B, T, D).

    What a sub-layer adds waits here for the norm that follows, so that both are one site.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._waiting: tuple[Tensor | None, Tensor] | None = None

    def add(self, branch: Tensor, gate: Tensor | None) -> None:
        """Add gate * branch, or branch alone. gate: (B, N, D)."""
        self._waiting = gate, branch

    def normed(self, norm: Any, *modulations: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """The norm of the tokens under each (shift, scale), two at most; without any, the norm itself."""
        if self._waiting is None:
            shift, scale = modulations[0]
            return (rms_norm_modulate(self._tokens, shift, scale, eps=norm.eps),)
        gate, branch = self._waiting
        self._waiting = None
        self._tokens, *normed = residual_rms_norm_modulate(
            self._tokens, gate, branch, *modulations, eps=norm.eps
        )
        return tuple(normed)

    def ended(self, gate: Tensor, branch: Tensor) -> Tensor:
        """The tokens after the last sub-layer, which no norm follows."""
        return gated_residual(self._tokens, gate, branch)


@dataclass(frozen=True)
class CrossModulation:
    """What the attention between the modalities uses of one of them.

    to_video, to_audio: (shift, scale) of its norm, where video or audio asks. gate: of what it receives.
    """

    to_video: tuple[Tensor, Tensor]
    to_audio: tuple[Tensor, Tensor]
    gate: Tensor


def attend_to_self(
    stream: Stream,
    norm: Any,
    attn: Any,
    modulation: tuple[Tensor, ...],
    *,
    rope: Rope | None,
    mask: Tensor | None,
    perturbation: Mapping[str, Any],
) -> None:
    shift, scale, gate = modulation[:3]
    (normed,) = stream.normed(norm, (shift, scale))
    stream.add(attention(attn, normed, rope=rope, mask=mask, perturbation=perturbation), gate)


def attend_to_text(
    stream: Stream, norm: Any, attn: Any, modulation: tuple[Tensor, ...], text: Context, mask: Tensor | None
) -> None:
    """modulation: in LTX-2.3 its last three of nine are of the queries here; six have none for them."""
    gate = None
    if len(modulation) == 6:
        (normed,) = stream.normed(norm)
    else:
        shift, scale, gate = modulation[6:]
        (normed,) = stream.normed(norm, (shift, scale))
    attended = attn(normed, encoder_hidden_states=text, query_rotary_emb=None, attention_mask=mask)
    stream.add(attended, gate)


def feed_forward(stream: Stream, norm: Any, ff: Any, modulation: tuple[Tensor, ...]) -> Tensor:
    shift, scale, gate = modulation[3:6]
    (normed,) = stream.normed(norm, (shift, scale))
    return stream.ended(gate, ff(normed))


def modulated_text(block: Any, table: Tensor, temb: NoiseVectors | None, text: Tensor) -> Tensor:
    """text: (B, L, D). table: (2, D). temb: `None` where noise does not modulate the text."""
    if temb is None:
        shift, scale = table.to(device=text.device, dtype=text.dtype)[None, None].unbind(dim=2)
    else:
        shift, scale = block.get_mod_params(table, temb, text.shape[0])
    return modulate(text, shift, scale)


def cross_modulation(
    block: Any, table: Tensor, scale_shift: NoiseVectors, gate: NoiseVectors, *, rows: int
) -> CrossModulation:
    """table: (5, D), scale and shift where video asks, scale and shift where audio asks, gate."""
    video_scale, video_shift, audio_scale, audio_shift = block.get_mod_params(table[:4], scale_shift, rows)
    (gate,) = block.get_mod_params(table[4:], gate, rows)
    return CrossModulation((video_shift, video_scale), (audio_shift, audio_scale), gate)
