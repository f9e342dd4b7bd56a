"""Layers of the FLUX 3 video VAE encoder, channels-last (B, T, H, W, C) (spec section 6).

Weights are allocated, not initialised. Every layer has `prepare(grid)`, which builds the tables that
it reads for one grid, on its weights' device, and returns the grid after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.fusion import swiglu
from pipelines.flux3_action.neighbourhood_attention import (
    Axis,
    Neighbourhood,
    build_neighbourhood,
    neighbourhood_attention,
)

EPS = 1e-5
Grid = tuple[int, int, int]
"""(T, H, W) in positions, or in frames and pixels where it describes a canvas."""


class Sequence(nn.Sequential):
    """Layers in order."""

    def prepare(self, grid: Grid) -> Grid:
        layer: Any
        for layer in self:
            grid = layer.prepare(grid)
        return grid


class Linear(nn.Linear):
    """A linear layer whose weights come from a checkpoint."""

    def reset_parameters(self) -> None: ...


class LayerNorm(nn.LayerNorm):
    """An affine layer norm whose weights come from a checkpoint."""

    def __init__(self, width: int, *, dtype: torch.dtype) -> None:
        super().__init__(width, eps=EPS, dtype=dtype)

    def reset_parameters(self) -> None: ...


class Conv3d(nn.Conv3d):
    """Convolution weights that come from a checkpoint."""

    def reset_parameters(self) -> None: ...


class PatchEmbedding(nn.Module):
    """(B, 3, T, H, W) -> (B, T', H', W', width): one linear map per patch."""

    def __init__(self, width: int, patch: Grid, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch = patch
        self.proj = Conv3d(3, width, patch, stride=patch, dtype=dtype)

    def prepare(self, grid: Grid) -> Grid:
        t, h, w = (math.ceil(n / p) for n, p in zip(grid, self.patch, strict=True))
        return t, h, w

    def forward(self, canvas: Tensor) -> Tensor:
        batch, channels, t, h, w = canvas.shape
        pt, ph, pw = self.patch
        padded = F.pad(canvas, (0, -w % pw, 0, -h % ph, 0, -t % pt))
        cells = padded.reshape(batch, channels, -(-t // pt), pt, -(-h // ph), ph, -(-w // pw), pw)
        # As kernel = stride, the convolution is one matrix product.
        rows = cells.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)
        embedded: Tensor = F.linear(rows, self.proj.weight.flatten(1), self.proj.bias)
        return embedded


class Block(nn.Module):
    """Pre-norm attention and SwiGLU on (B, T, H, W, width)."""

    def __init__(self, width: int, heads: int, window: Grid, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, dtype=dtype)
        self.attn = Attention(width, heads, window, dtype)
        self.norm2 = LayerNorm(width, dtype=dtype)
        self.mlp = Mlp(width, dtype)

    def prepare(self, grid: Grid) -> Grid:
        self.attn.prepare(grid)
        return grid

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.attn(self.norm1(x))
        out: Tensor = attended + self.mlp(self.norm2(attended))
        return out


class Mlp(nn.Module):
    """SwiGLU; hidden width is 8/3 of the input, rounded up to a multiple of 64."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = 64 * math.ceil(int(8 * width / 3) / 64)
        self.gate_up_proj = Linear(width, 2 * hidden, bias=False, dtype=dtype)
        self.down_proj = Linear(hidden, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(swiglu(self.gate_up_proj(x)))
        return down


@dataclass(frozen=True)
class _Tables:
    """What attention reads for one grid of N positions. cos, sin: (N, 1, 1, head_dim), sin signed."""

    neighbourhood: Neighbourhood
    cos: Tensor
    sin: Tensor


class Attention(nn.Module):
    """Neighbourhood attention, causal in time, with q/k RMS norm and rotary positions."""

    def __init__(self, width: int, heads: int, window: Grid, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = Linear(width, 3 * width, dtype=dtype)
        self.proj = Linear(width, width, dtype=dtype)
        self.rope = Rotary(width // heads)
        self._tables: dict[tuple[Grid, torch.device], _Tables] = {}

    def prepare(self, grid: Grid) -> None:
        device, dtype = self.qkv.weight.device, self.qkv.weight.dtype
        if (grid, device) in self._tables:  # tables stay where they are: graphs read them by address
            return
        axes = [Axis(n, k, causal=i == 0) for i, (n, k) in enumerate(zip(grid, self.window, strict=True))]
        cos, sin = (table.to(device, dtype) for table in self.rope.tables(grid))
        self._tables[grid, device] = _Tables(build_neighbourhood(axes).to(device, dtype), cos, sin)

    @torch.inference_mode()  # where the tables may have been made
    def refresh(self) -> None:
        """Compute the positions of all prepared grids again, in place."""
        for (grid, _), tables in self._tables.items():
            cos, sin = self.rope.tables(grid)
            tables.cos.copy_(cos)
            tables.sin.copy_(sin)

    def forward(self, x: Tensor) -> Tensor:
        batch, t, h, w, width = x.shape
        tables = self._tables[(t, h, w), x.device]
        qkv = self.qkv(x).view(batch, t * h * w, 3, self.heads, width // self.heads)
        qk = F.rms_norm(qkv[:, :, :2], qkv.shape[-1:], eps=EPS)
        # The sign of the rotated half is in `sin`, so a roll does for [-second half, first half].
        qk = qk * tables.cos + qk.roll(qk.shape[-1] // 2, dims=-1) * tables.sin
        heads = neighbourhood_attention(qk[:, :, 0], qk[:, :, 1], qkv[:, :, 2], tables.neighbourhood)
        out: Tensor = self.proj(heads.view(x.shape))
        return out


class Rotary(nn.Module):
    """Frequencies in rows t, h, w and an unused one; (4, head_dim / 8) float32."""

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        c = head_dim // 4
        row = [256.0 ** (-2 * i / c) for i in range(c // 2)]
        rows = torch.tensor([row, row, row, [0.0] * len(row)], dtype=torch.float32)
        self.register_buffer("inv_freq", rows)

    def tables(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """cos and sign-carrying sin of all positions, float32 (N, 1, 1, head_dim) on the CPU."""
        inv_freq = self.inv_freq.float().cpu()  # the same bits on every device
        positions = torch.cartesian_prod(*(torch.arange(n, device="cpu") for n in (*grid, 1)))  # (N, 4)
        angles = (positions[:, :, None] * inv_freq).flatten(1)[:, None, None, :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


class PatchMerging(nn.Module):
    """(B, T, H, W, width) -> (B, T, ceil(H/2), ceil(W/2), out): four neighbours become one."""

    def __init__(self, width: int, out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * width, dtype=dtype)
        self.reduction = Linear(4 * width, out, bias=False, dtype=dtype)

    def prepare(self, grid: Grid) -> Grid:
        return grid[0], math.ceil(grid[1] / 2), math.ceil(grid[2] / 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, t, h, w, width = x.shape
        padded = F.pad(x, (0, 0, 0, w % 2, 0, h % 2))
        cells = padded.view(batch, t, -(-h // 2), 2, -(-w // 2), 2, width)
        merged: Tensor = self.reduction(self.norm(cells.transpose(3, 4).flatten(4)))
        return merged


class TemporalMerging(nn.Module):
    """(B, T, H, W, width) -> (B, ceil(T/2), H, W, width), with the mean of the pair as a skip."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = LayerNorm(2 * width, dtype=dtype)
        self.reduction = Linear(2 * width, width, bias=False, dtype=dtype)

    def prepare(self, grid: Grid) -> Grid:
        return math.ceil(grid[0] / 2), grid[1], grid[2]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            x = torch.cat([x[:, :1], x], dim=1)
        a, b = x[:, 0::2], x[:, 1::2]
        merged: Tensor = self.reduction(self.norm(torch.cat([a, b], dim=-1)))
        return merged + (a + b) / 2
