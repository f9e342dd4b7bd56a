"""The plain PyTorch expression of every fusion site.

These are what eager runs, what a kernel is compared with, and the baseline a speed-up is measured
against. Every operation rounds its result to the storage dtype unless it works in fp32. Arguments are
described with the sites, in `accel.fusion.sites`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12


def modulate(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(1 + scale) * normed + shift, three roundings."""
    return (1 + scale) * normed + shift


def gated_residual(x: Tensor, gate: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
    """x + gate * (a + b), three roundings; two without b."""
    return x + gate * (a if b is None else a + b)


def layer_norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, segment: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm rounded to storage, then `modulate`."""
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    return modulate(normed, per_token(shift, segment), per_token(scale, segment))


def residual_layer_norm_modulate(
    x: Tensor,
    gate: Tensor,
    a: Tensor,
    b: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    segment: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`gated_residual`, rounded, then `layer_norm_modulate` of it."""
    x = gated_residual(x, per_token(gate, segment), a, b)
    return x, layer_norm_modulate(x, shift, scale, segment, eps)


def per_token(rows: Tensor, segment: Tensor | None) -> Tensor:
    """Rows (B, S, D) of segments as one row per token (B, L, D); without `segment` as they are."""
    return rows if segment is None else rows.index_select(1, segment)


def rms_norm_modulate(x: Tensor, shift: Tensor | None, scale: Tensor | None, eps: float) -> Tensor:
    """Weightless RMS norm with fp32 statistics, rounded to storage, then `modulate` if there is a scale."""
    normed = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if shift is None or scale is None else modulate(normed, shift, scale)


def residual_rms_norm_modulate(
    x: Tensor,
    gate: Tensor | None,
    branch: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    shift2: Tensor | None,
    scale2: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """Residual, rounded; its RMS norm, rounded; one or two modulations of that."""
    x = x + branch if gate is None else gated_residual(x, gate, branch)
    normed = rms_norm_modulate(x, None, None, eps)
    first = normed if shift is None or scale is None else modulate(normed, shift, scale)
    if shift2 is None or scale2 is None:
        return x, first
    return x, first, modulate(normed, shift2, scale2)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, cos_sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMS norm over d, times scale, then interleaved rotation: roundings after each of the three."""
    cos, sin = cos_sin.unsqueeze(2).chunk(2, dim=-1)  # (B, L, 1, d/2) each
    return (
        _rotate_pairs(_rms_norm_times(q, q_scale, eps), cos, sin),
        _rotate_pairs(_rms_norm_times(k, k_scale, eps), cos, sin),
    )


def joint_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    first_q: Tensor | None = None,
    first_k: Tensor | None = None,
    first_q_scale: Tensor | None = None,
    first_k_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ATen's RMS norm over d with weight, one rounding; concatenation; rotation in fp32, one rounding."""
    q, k = _rms_norm(q, q_scale, eps), _rms_norm(k, k_scale, eps)
    if first_q is not None and first_k is not None:
        assert first_q_scale is not None
        assert first_k_scale is not None
        q = torch.cat([_rms_norm(first_q, first_q_scale, eps), q], dim=1)
        k = torch.cat([_rms_norm(first_k, first_k_scale, eps), k], dim=1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return _rotate_interleaved(q, cos, sin), _rotate_interleaved(k, cos, sin)


def qk_norm_split_rope(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """ATen's RMS norm over H * d with weight, one rounding; halves of each head turn in fp32 with FMA."""
    k_cos, k_sin = cos if k_cos is None else k_cos, sin if k_sin is None else k_sin
    return (
        _rotate_halves(_rms_norm(q, q_scale, eps), cos, sin),
        _rotate_halves(_rms_norm(k, k_scale, eps), k_cos, k_sin),
    )


def swiglu(packed: Tensor) -> Tensor:
    """silu(gate) * value of packed = [gate | value], two roundings."""
    gate, value = packed.chunk(2, dim=-1)
    return F.silu(gate) * value


def swiglu_concat(first: Tensor, packed: Tensor) -> Tensor:
    """[first | swiglu(packed)] along the last dimension."""
    return torch.cat([first, swiglu(packed)], dim=-1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 scale max(amax / 448, 1e-12) of every row; values x / scale, clamped, nearest even to E4M3."""
    wide = x.float()
    scale = (wide.abs().amax(dim=-1) / E4M3_MAX).clamp_min(SMALLEST_SCALE)
    values = (wide / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return values.to(torch.float8_e4m3fn), scale


def swiglu_quantize_rows(packed: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `swiglu`, which is rounded to storage in between."""
    return quantize_rows(swiglu(packed))


def guided_euler_step(
    sample: Tensor, cond: Tensor, uncond: Tensor | None, guidance: float, delta: Tensor
) -> Tensor:
    """sample + delta * velocity in fp32, rounded to the velocity's dtype; guidance in that dtype."""
    velocity = cond if uncond is None else uncond + guidance * (cond - uncond)
    return (sample.float() + delta * velocity).to(velocity.dtype)


def group_norm_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Group norm, rounded to storage, then SiLU."""
    return F.silu(F.group_norm(x, groups, weight, bias, eps))


def channel_norm_silu(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x**2 over dim 1) + eps), then SiLU; every operation rounds to storage."""
    return F.silu(x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + eps))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rms_norm_times(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms).to(x.dtype) * scale


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pair j, channels 2j and 2j + 1, turns by angle j of d / 2."""
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1).flatten(-2).to(x.dtype)


def _rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `_rotate_pairs`, with every angle given twice."""
    even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, L, H * d), cos and sin (B, H, L, d / 2): channel j of a head turns with channel j + d / 2."""
    batch, heads, length, _ = cos.shape
    halves = x.view(batch, length, heads, 2, -1).transpose(1, 2).float()  # (B, H, L, 2, d/2)
    first, second = halves.unbind(-2)
    turned = torch.stack(
        [torch.addcmul(first * cos, -sin, second), torch.addcmul(second * cos, sin, first)], dim=-2
    )
    return turned.to(x.dtype).transpose(1, 2).reshape(x.shape)
