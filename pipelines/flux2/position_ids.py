"""Coordinates (time, row, column, text position) of FLUX.2's tokens, int64 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Grid = tuple[int, int]
"""Rows and columns of tokens of one image."""

_REFERENCE_TIME = 10
"""Reference image i stands at time 10 + 10 i; the image that is made at 0."""


def text_position_ids(length: int) -> Tensor:
    """(length, 4): texts count along the last axis."""
    return _grid_ids(text=length)


def image_position_ids(grid: Grid, references: Sequence[Grid] = ()) -> Tensor:
    """(N, 4) of the image that is made, then of the reference images in order, row-major."""
    times = (_REFERENCE_TIME * (1 + index) for index in range(len(references)))
    return torch.cat(
        [_grid_ids(grid), *(_grid_ids(g, time=time) for g, time in zip(references, times, strict=True))]
    )


def _grid_ids(grid: Grid = (1, 1), *, time: int = 0, text: int = 1) -> Tensor:
    rows, columns = grid
    starts, counts = (time, 0, 0, 0), (1, rows, columns, text)
    return torch.cartesian_prod(
        *(torch.arange(start, start + n, device="cpu") for start, n in zip(starts, counts, strict=True))
    )
