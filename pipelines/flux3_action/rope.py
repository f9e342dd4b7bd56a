"""Rotary position tables of the joint transformer (spec section 8.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rope_table(ids: Tensor, *, axes_dim: Sequence[int], theta: float) -> Tensor:
    """Cosines and sines of every token's rotation angles.

    ids: integer (B, L, axes), one coordinate per axis.
    axes_dim: channels that each axis rotates, even, summing to head_dim.
    Returns fp32 (B, L, head_dim) = [cos | sin]; entry j of a half rotates channels (2j, 2j + 1).

    Angles are computed in fp64: a coordinate in fp32 times a small frequency would already be off.
    """
    angles = [
        ids[..., axis, None].double() * _frequencies(dim, theta, ids.device)
        for axis, dim in enumerate(axes_dim)
    ]
    angle = torch.cat(angles, dim=-1)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()


def _frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    return 1.0 / theta**exponents
