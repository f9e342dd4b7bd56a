"""Rows that belong to stretches of a sequence instead of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class SegmentRows:
    """One row for every segment of a sequence.

    rows: (B, S, D). segment: int32 (L,), the row of each token, in 0..S-1.
    """

    rows: Tensor
    segment: Tensor

    @cached_property
    def per_token(self) -> Tensor:
        """(B, L, D): the rows as a model without segments has them; made once, on first use."""
        return self.rows.index_select(1, self.segment)


Rows: TypeAlias = Tensor | SegmentRows


def token_rows(rows: Rows) -> Tensor:
    """(B, 1, D) or (B, L, D), for plain expressions."""
    return rows.per_token if isinstance(rows, SegmentRows) else rows


def split_rows(*rows: Rows) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The tensors of several rows, and the segments that they share; `None` for rows of tokens.

    Raises: ValueError if they do not share them.
    """
    segments = [each.segment if isinstance(each, SegmentRows) else None for each in rows]
    if any(segment is not segments[0] for segment in segments):
        raise ValueError("shift, scale and gate belong to different segments; build them with one `segment`")
    return tuple(each.rows if isinstance(each, SegmentRows) else each for each in rows), segments[0]


def segment_index(lengths: Sequence[int], *, device: torch.device) -> Tensor:
    """int32 (sum(lengths),): which of the segments, of `lengths` tokens, each token is in."""
    return torch.cat(
        [torch.full((length,), i, dtype=torch.int32, device=device) for i, length in enumerate(lengths)]
    )
