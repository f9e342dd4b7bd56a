# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""qk_norm_rope for heads of 128: norm, scale and rotation of q and k in one pass.

n = r(x * rsqrt(mean(x * x) + eps)); s = r(n * scale); for pairs (e, o) of s:
y = (r(c * e - s * o), r(s * e + c * o)). r rounds to the storage dtype, all else is fp32 without
contraction. The mean adds in the order of ATen (fusion spec section 3.3): 32 lanes hold 4 neighbours
each, ((a0 + a1) + a2) + a3, then lanes fold at distance 16, 8, 4, 2, 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.layout import head_strides, row_strides
from accel.fusion.kernels.rounding import MIN_EPS, round_to, store_as, widen
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel
from accel.fusion.stress import first_rows

_HEAD_DIM = 128
_GROUP = 8  # heads a program handles


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _sum_of_squares(x, group: tl.constexpr):
    """(group, 128) -> (group,). Each fold reduces an axis of two, so that its order is certain."""
    low, high = tl.split(tl.reshape(x * x, (group, 32, 2, 2)))
    first, third = tl.split(low)
    second, fourth = tl.split(high)
    lanes = tl.reshape(((first + second) + third) + fourth, (group, 2, 2, 2, 2, 2))
    for _ in tl.static_range(5):
        lanes = tl.reduce(lanes, 1, _add)
    return lanes


@triton.jit
def _norm_and_rotate(x, scale, cos, sin, eps, dtype: tl.constexpr, group: tl.constexpr):
    """(group, 128) fp32 -> (group, 128) of `dtype`; scale (1, 128), cos and sin (1, 64)."""
    mean = _sum_of_squares(x, group) * (1.0 / 128)
    inverse_rms = tl.rsqrt(mean + eps)
    normed = round_to(x * tl.reshape(inverse_rms, (group, 1)), dtype)
    scaled = round_to(normed * scale, dtype)
    even, odd = tl.split(tl.reshape(scaled, (group, 64, 2)))
    rotated = tl.join(cos * even - sin * odd, sin * even + cos * odd)
    return store_as(tl.reshape(rotated, (group, 128)), dtype)


@triton.jit
def _qk_norm_rope_kernel(
    q_out,
    k_out,
    q,
    k,
    q_scale,
    k_scale,
    cos_sin,
    batch_stride,
    token_stride,
    head_stride,
    cos_sin_batch,
    cos_sin_token,
    eps,
    heads: tl.constexpr,
    group: tl.constexpr,
):
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = q_out.dtype.element_ty
    head = tl.program_id(1) * group + tl.arange(0, group)[:, None]
    channel = tl.arange(0, 128)[None, :]
    inside = head < heads
    source = batch * batch_stride + token * token_stride + head * head_stride + channel
    target = ((batch * tl.num_programs(0) + token) * heads + head) * 128 + channel

    angle = cos_sin + batch * cos_sin_batch + token * cos_sin_token + tl.arange(0, 64)[None, :]
    cos, sin = tl.load(angle), tl.load(angle + 64)
    for_q = widen(tl.load(q_scale + channel))
    for_k = widen(tl.load(k_scale + channel))
    q_tile = widen(tl.load(q + source, mask=inside, other=0.0))
    k_tile = widen(tl.load(k + source, mask=inside, other=0.0))
    tl.store(q_out + target, _norm_and_rotate(q_tile, for_q, cos, sin, eps, dtype, group), mask=inside)
    tl.store(k_out + target, _norm_and_rotate(k_tile, for_k, cos, sin, eps, dtype, group), mask=inside)


def _plan(
    q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, cos_sin: Tensor, eps: float
) -> Callable[..., tuple[Tensor, Tensor]]:
    batch, tokens, heads, _ = q.shape
    new = allocator(q.shape, q.dtype, q.device)
    launch = Launch(
        _qk_norm_rope_kernel,
        (tokens, triton.cdiv(heads, _GROUP), batch),
        *head_strides(q),
        *row_strides(cos_sin),
        eps,
        heads=heads,
        group=_GROUP,
    )

    def run(
        q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, cos_sin: Tensor, _: float
    ) -> tuple[Tensor, Tensor]:
        q_out, k_out = new(), new()
        launch(q_out, k_out, q, k, q_scale, k_scale, cos_sin)
        return q_out, k_out

    return run


def _refuses(q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, cos_sin: Tensor, eps: float) -> str:
    if q.dim() != 4 or q.shape[3] != _HEAD_DIM:
        return f"q: shape {tuple(q.shape)}, not (B, L, H, {_HEAD_DIM})"
    if (q.shape, q.stride(), q.dtype) != (k.shape, k.stride(), k.dtype):
        return "q and k differ in shape, strides or dtype"
    if q.stride(3) != 1 or q.stride(2) < _HEAD_DIM or (q.shape[1] > 1 and q.stride(1) < q.stride(2)):
        return f"q: strides {q.stride()}"
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if scale.dtype != q.dtype or scale.shape != (_HEAD_DIM,) or scale.stride(0) != 1:
            return f"{name}: {scale.dtype} {tuple(scale.shape)}"
    if cos_sin.dtype != torch.float32:
        return f"cos_sin: {cos_sin.dtype}, not fp32"
    if cos_sin.dim() != 3 or cos_sin.stride(2) != 1 or cos_sin.shape[1:] != (q.shape[1], _HEAD_DIM):
        return f"cos_sin: shape {tuple(cos_sin.shape)}, strides {cos_sin.stride()}"
    if eps < MIN_EPS:
        return f"eps {eps}: `tl.rsqrt` flushes subnormal numbers"
    return "" if cos_sin.shape[0] in (1, q.shape[0]) else f"cos_sin: batch of {cos_sin.shape[0]}"


def bytes_moved(q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, cos_sin: Tensor, eps: float) -> int:
    """Bytes that must pass between memory and chip: q and k in and out, the rest once."""
    return 2 * (q.nbytes + k.nbytes) + q_scale.nbytes + k_scale.nbytes + cos_sin.nbytes


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=first_rows)
