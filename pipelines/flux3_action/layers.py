"""Layers of the joint transformer (spec sections 8.1, 8.2, 8.4).

Parameters are allocated uninitialised on the current default device and never require gradients.
Module names give the checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.fusion import (
    gated_residual,
    layer_norm_modulate,
    qk_norm_rope,
    residual_layer_norm_modulate,
    swiglu,
)
from accel.fusion.segments import Rows, SegmentRows, segment_index, token_rows
from pipelines.flux3_action.fp8 import Fp8Linear
from pipelines.flux3_action.policy_config import TransformerConfig

LAYER_NORM_EPS = 1e-6
QK_NORM_EPS = 1e-6

LinearFactory = Callable[[int, int], nn.Module]
"""(in_features, out_features) -> a linear without bias, of the precision it was asked for."""


@dataclass(frozen=True)
class Modulation:
    """What a block does to a sequence: y = (1 + scale) LN(x) + shift, x + gate * branches.

    Each (B, 1, D), one for all tokens, (B, L, D), one per token, or one per segment; model dtype.
    """

    shift: Rows
    scale: Rows
    gate: Rows


def concat_modulations(modulations: Sequence[Modulation], lengths: Sequence[int]) -> Modulation:
    """Modulation of a sequence made of segments of `lengths` tokens.

    modulations: of each segment, one row for all its tokens or one per token.
    """
    shifts = [token_rows(modulation.shift) for modulation in modulations]
    one_each = all(shift.shape[1] == 1 for shift in shifts)
    segment = segment_index(lengths, device=shifts[0].device) if one_each else None

    def joined(parts: Sequence[Rows]) -> Rows:
        rows = [token_rows(part) for part in parts]
        if segment is not None:
            return SegmentRows(torch.cat(rows, dim=1), segment)
        pairs = zip(rows, lengths, strict=True)
        return torch.cat([part.expand(-1, length, -1) for part, length in pairs], dim=1)

    return Modulation(
        shift=joined([m.shift for m in modulations]),
        scale=joined([m.scale for m in modulations]),
        gate=joined([m.gate for m in modulations]),
    )


class Linear(nn.Module):
    """x @ weight.T, weight (out, in)."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter(out_features, in_features, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedder(nn.Module):
    """Two-layer embedding of the time or of the vector input: (..., in) -> (..., D)."""

    def __init__(self, in_features: int, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.in_layer = linear(in_features, hidden_size)
        self.out_layer = linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.out_layer(F.silu(self.in_layer(x)))
        return embedded


class StreamModulation(nn.Module):
    """Block modulation of one stream from its vec (B, 1 or L, D)."""

    def __init__(self, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.lin = linear(hidden_size, 3 * hidden_size)

    def forward(self, vec: Tensor) -> Modulation:
        shift, scale, gate = self.lin(F.silu(vec)).chunk(3, dim=-1)
        return Modulation(shift, scale, gate)


class FinalLayer(nn.Module):
    """Reads a stream's velocity out of its hidden states."""

    def __init__(self, hidden_size: int, out_channels: int, linear: LinearFactory) -> None:
        super().__init__()
        self.linear = linear(hidden_size, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), linear(hidden_size, 2 * hidden_size))

    def modulation(self, vec: Tensor) -> tuple[Tensor, Tensor]:
        """vec (B, 1 or L, D) -> shift and scale of that shape."""
        shift, scale = self.adaLN_modulation(vec).chunk(2, dim=-1)
        return shift, scale

    def forward(self, hidden: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """hidden (B, L, D) -> (B, L, channels)."""
        velocity: Tensor = self.linear(layer_norm_modulate(hidden, shift, scale, eps=LAYER_NORM_EPS))
        return velocity


class Block(nn.Module):
    """Attention and gated MLP side by side on one modulated input.

    `proj_in` fuses the projections that read that input: rows [q; k; v; gate; value].
    """

    def __init__(self, config: TransformerConfig, linear: LinearFactory, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.fused_rows = list(fused_rows(config).values())
        self.proj_in = linear(config.hidden_size, sum(self.fused_rows))
        self.attn_out = linear(config.hidden_size, config.hidden_size)
        self.mlp_out = linear(config.mlp_hidden, config.hidden_size)
        self.norm = _QKNorm(config.head_dim, dtype=dtype)

    def forward(self, y: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """The two branches, each (B, L, D), of a block at its modulated input; see `run_blocks`.

        y: (B, L, D). rope: fp32 (B, L, head_dim) from `rope_table`.
        """
        q, k, v, packed = torch.split(self.proj_in(y), self.fused_rows, dim=-1)
        return self.attn_out(self._attention(q, k, v, rope)), self._mlp(packed)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (part.view(*part.shape[:-1], self.num_heads, -1) for part in (q, k, v))
        q, k = qk_norm_rope(q, k, self.norm.query_norm.scale, self.norm.key_norm.scale, rope, eps=QK_NORM_EPS)
        heads = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return heads.transpose(1, 2).flatten(2)

    def _mlp(self, packed: Tensor) -> Tensor:
        if isinstance(self.mlp_out, Fp8Linear):
            return self.mlp_out.after_swiglu(packed)
        out: Tensor = self.mlp_out(swiglu(packed))
        return out


def run_blocks(
    blocks: Sequence[Callable[..., tuple[Tensor, Tensor]]], x: Tensor, modulation: Modulation, rope: Tensor
) -> Tensor:
    """Blocks in order, each x + gate * (attention + mlp) of (1 + scale) LN(x) + shift.

    x: (B, L, D). rope: fp32 (B, L, head_dim). Returns (B, L, D). A block's sum and the next one's
    modulated norm go together, so that the sum is read once: they share one modulation.
    """
    shift, scale, gate = modulation.shift, modulation.scale, modulation.gate
    *others, last = blocks
    y = layer_norm_modulate(x, shift, scale, eps=LAYER_NORM_EPS)
    for block in others:
        x, y = residual_layer_norm_modulate(x, gate, *block(y, rope), shift, scale, eps=LAYER_NORM_EPS)
    return gated_residual(x, token_rows(gate), *last(y, rope))


def fused_rows(config: TransformerConfig) -> dict[str, int]:
    """Checkpoint name -> output rows of the linears that `Block.proj_in` fuses, in order."""
    width = config.hidden_size
    return {"q_proj": width, "k_proj": width, "v_proj": width, "mlp_in": 2 * config.mlp_hidden}


class _QKNorm(nn.Module):
    """Holds the RMS-norm scales (head_dim,) of queries and keys; `qk_norm_rope` applies them."""

    def __init__(self, head_dim: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.query_norm = _Scale(head_dim, dtype=dtype)
        self.key_norm = _Scale(head_dim, dtype=dtype)


class _Scale(nn.Module):
    def __init__(self, size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = _parameter(size, dtype=dtype)


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
