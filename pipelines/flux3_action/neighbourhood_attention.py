"""Neighbourhood attention over an N-dimensional grid in plain PyTorch (spec section 6.2).

Every position attends to a window of `k` positions per axis. An ordinary window is centred and
moves inward at the borders; a causal window ends at the position itself and shrinks at the start.

Queries are cut into tiles. The windows of one tile lie within `tile + k - 1` consecutive keys per
axis, so a tile is one small dense attention with a mask, and all tiles are one batched call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.errors import ConfigError

TILE = 8
"""Query tile per axis. With window 5 a 2-D tile has 64 queries and 144 keys, both multiples of 8."""


@dataclass(frozen=True)
class Axis:
    """One axis of a grid: its length, window (both in positions) and whether the window is causal."""

    length: int
    window: int
    causal: bool = False


@dataclass(frozen=True)
class Neighbourhood:
    """Index tables of one grid with N positions, row-major.

    queries: (tiles, Q) int64, positions of each tile's queries; a short last tile repeats the border.
    keys: (tiles, S) int64, positions that the tile may see.
    mask: (tiles, 1, Q, S) additive, 0 inside the query's own window and -inf outside.
    places: (N,) int64, where in the flattened `queries` a position is found.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor
    places: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Neighbourhood:
        """Tables on `device`, the mask in `dtype`, which must be that of the queries."""
        return Neighbourhood(
            self.queries.to(device), self.keys.to(device), self.mask.to(device, dtype), self.places.to(device)
        )


def build_neighbourhood(axes: Sequence[Axis]) -> Neighbourhood:
    """Tables for the product of `axes`, on the CPU with a float32 mask.

    Raises: ConfigError if an axis that is not causal is shorter than its window.
    """
    queries = keys = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    allowed = torch.ones(1, 1, 1, dtype=torch.bool, device="cpu")
    positions = 1
    for axis in axes:
        axis_queries, axis_keys, axis_allowed = _tile_axis(axis)
        queries = _outer(queries * axis.length, axis_queries)
        keys = _outer(keys * axis.length, axis_keys)
        both = allowed[:, None, :, None, :, None] & axis_allowed[None, :, None, :, None, :]
        allowed = both.flatten(4, 5).flatten(2, 3).flatten(0, 1)
        positions *= axis.length
    order = queries.flatten().argsort(stable=True)
    first = torch.searchsorted(queries.flatten()[order], torch.arange(positions, device="cpu"))
    mask = torch.zeros(allowed.shape, device="cpu").masked_fill(~allowed, -torch.inf)
    return Neighbourhood(queries, keys, mask.unsqueeze(1), order[first])


def neighbourhood_attention(q: Tensor, k: Tensor, v: Tensor, tables: Neighbourhood) -> Tensor:
    """Softmax attention within windows, scaled by `head_dim ** -0.5`.

    q, k, v: (B, N, heads, head_dim) in one floating dtype, positions row-major.
    Returns (B, N, heads, head_dim).
    """
    batch = q.shape[0]
    attended = F.scaled_dot_product_attention(
        _gather_tiles(q, tables.queries),
        _gather_tiles(k, tables.keys),
        _gather_tiles(v, tables.keys),
        attn_mask=tables.mask.expand(batch, *tables.mask.shape).flatten(0, 1),
    )  # (B * tiles, heads, Q, head_dim)
    rows = attended.transpose(1, 2).reshape(batch, -1, *q.shape[2:])
    return rows.index_select(1, tables.places)


def _tile_axis(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (tiles, tile), keys (tiles, span) and allowed (tiles, tile, span) of one axis."""
    n, k = axis.length, axis.window
    if n < k and not axis.causal:
        raise ConfigError(f"an axis of {n} positions is shorter than its attention window of {k}")
    tile, span = min(TILE, n), min(TILE + k - 1, n)
    reach = k - 1 if axis.causal else k // 2  # positions a window looks back
    starts = torch.arange(0, n, tile, device="cpu")
    queries = (starts[:, None] + torch.arange(tile, device="cpu")).clamp(max=n - 1)
    keys = (starts - reach).clamp(0, n - span)[:, None] + torch.arange(span, device="cpu")
    first = queries - reach
    if not axis.causal:
        first = first.clamp(0, n - k)
    offset = keys[:, None, :] - first[:, :, None]
    return queries, keys, (offset >= 0) & (offset < k)


def _outer(outer: Tensor, inner: Tensor) -> Tensor:
    """(a, b) + (c, d) -> (a * c, b * d), both row-major."""
    return (outer[:, None, :, None] + inner[None, :, None, :]).flatten(2, 3).flatten(0, 1)


def _gather_tiles(x: Tensor, positions: Tensor) -> Tensor:
    """(B, N, heads, head_dim) at (tiles, P) positions -> (B * tiles, heads, P, head_dim)."""
    rows = x.index_select(1, positions.flatten())
    return rows.view(-1, positions.shape[1], *x.shape[2:]).transpose(1, 2)
