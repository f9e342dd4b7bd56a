"""Modulation of all blocks in one sum a kind, where every block would add its own table to the same vectors.

A pass of 48 blocks makes 288 such sums, 384 in LTX-2.3, each of a few thousand numbers: on a device they
cost their launches alone. Element by element the sum for all blocks is the same, so the bits are equal.
Tables are read in every pass, so weights may change in place.
Source: fusion spec sections 8.2 and 8.5.

Shapes: B rows, n vectors of width D in a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from torch import Tensor

# Argument of a block -> the table that the block adds to it, and which rows of the table.
_TABLES: dict[str, tuple[str, slice]] = {
    "temb": ("scale_shift_table", slice(None)),
    "temb_audio": ("audio_scale_shift_table", slice(None)),
    "temb_ca_scale_shift": ("video_a2v_cross_attn_scale_shift_table", slice(4)),
    "temb_ca_audio_scale_shift": ("audio_a2v_cross_attn_scale_shift_table", slice(4)),
    "temb_ca_gate": ("video_a2v_cross_attn_scale_shift_table", slice(4, None)),
    "temb_ca_audio_gate": ("audio_a2v_cross_attn_scale_shift_table", slice(4, None)),
    "temb_prompt": ("prompt_scale_shift_table", slice(None)),
    "temb_prompt_audio": ("audio_prompt_scale_shift_table", slice(None)),
}


@dataclass(frozen=True)
class TableSum:
    """In the place of a block's argument: what the block makes of it, (B, 1, n, D)."""

    vectors: Tensor


def accept_sums(transformer: Any) -> None:
    """Let the blocks take `TableSum`; what else they are given they add their tables to, as before."""
    for block in transformer.transformer_blocks:
        block.get_mod_params = _modulation


def block_arguments(
    blocks: Sequence[Any], shared: Mapping[str, Tensor | None]
) -> list[dict[str, TableSum | Tensor | None]]:
    """Arguments of every block from those that all of them share, (B, N, n D), by the block's names.

    Where blocks do not take sums, or tokens have vectors of their own (N > 1: too much memory for all
    blocks at once), arguments stay as they are.
    """
    arguments: list[dict[str, TableSum | Tensor | None]] = [dict(shared) for _ in blocks]
    if not all(block.get_mod_params is _modulation for block in blocks):
        return arguments
    for name, temb in shared.items():
        if temb is not None and temb.shape[1] == 1:
            for of_block, vectors in zip(arguments, _sums(blocks, name, temb), strict=True):
                of_block[name] = TableSum(vectors)
    return arguments


def _sums(blocks: Sequence[Any], name: str, temb: Tensor) -> Iterator[Tensor]:
    """(B, 1, n, D) for every block."""
    table, part = _TABLES[name]
    tables = torch.stack([getattr(block, table)[part] for block in blocks])
    vectors = temb.reshape(temb.shape[0], 1, *tables.shape[1:])
    yield from (tables[:, None, None] + vectors).unbind()


def _modulation(scale_shift_table: Tensor, temb: Tensor | TableSum, batch_size: int) -> tuple[Tensor, ...]:
    """The n vectors, (B, N, D) each, as `LTX2VideoTransformerBlock.get_mod_params` gives them."""
    if isinstance(temb, TableSum):
        return temb.vectors.unbind(dim=2)
    summed: tuple[Tensor, ...] = LTX2VideoTransformerBlock.get_mod_params(scale_shift_table, temb, batch_size)
    return summed
