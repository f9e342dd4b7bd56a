"""The plain PyTorch expression of every fusion site.

These are what eager runs, what a kernel is compared with, and the baseline a speed-up is measured
against. Every operation rounds its result to the storage dtype unless it works in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def modulate(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(1 + scale) * normed + shift, three roundings."""
    return (1 + scale) * normed + shift


def swiglu(packed: Tensor) -> Tensor:
    """silu(gate) * value of packed = [gate | value], two roundings."""
    gate, value = packed.chunk(2, dim=-1)
    return F.silu(gate) * value


def gated_residual(x: Tensor, gate: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
    """x + gate * (a + b), three roundings; two without b."""
    return x + gate * (a if b is None else a + b)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, cos_sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMS norm over d, times scale, then interleaved rotation: roundings after each of the three."""
    cos, sin = cos_sin.unsqueeze(2).chunk(2, dim=-1)  # (B, L, 1, d/2) each
    return _rotate(_rms_norm(q, q_scale, eps), cos, sin), _rotate(_rms_norm(k, k_scale, eps), cos, sin)


def _rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms).to(x.dtype) * scale


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1).flatten(-2).to(x.dtype)
