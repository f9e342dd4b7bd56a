# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""joint_qk_norm_rope for heads of 128: norm and rotation of q and k, written to the joint token order.

n = r(weight * (x * rsqrt(sum(x * x) / 128 + eps))), the sum in ATen's order; for pairs (e, o) of n:
y = (r(c_e * e - s_e * o), r(c_o * o + s_o * e)). r rounds to the storage dtype, all else is fp32 and,
but for the sum, without contraction. One launch per source of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.aten_rms_norm import add_squares, fold_lanes, refuse_norm
from accel.fusion.kernels.layout import head_strides
from accel.fusion.kernels.rounding import round_to, store_as, widen
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel
from accel.fusion.stress import first_rows

_HEAD_DIM = 128
_GROUP = 8  # heads a program handles


@triton.jit
def _norm_and_rotate(x, weight, cos, sin, eps, dtype: tl.constexpr, group: tl.constexpr):
    """(group, 128) fp32 -> (group, 128) of `dtype`; weight, cos and sin (1, 128)."""
    squares = add_squares(tl.full((group * 32,), 0.0, tl.float32), x, group * 32)
    inverse_rms = tl.rsqrt(fold_lanes(squares, group) * (1.0 / 128) + eps)  # exact: a power of two
    normed = round_to(weight * (tl.reshape(inverse_rms, (group, 1)) * x), dtype)
    even, odd = tl.split(tl.reshape(normed, (group, 64, 2)))
    cos_even, cos_odd = tl.split(tl.reshape(cos, (1, 64, 2)))
    sin_even, sin_odd = tl.split(tl.reshape(sin, (1, 64, 2)))
    rotated = tl.join(even * cos_even - odd * sin_even, odd * cos_odd + even * sin_odd)
    return store_as(tl.reshape(rotated, (group, 128)), dtype)


@triton.jit(do_not_specialize=["start"])
def _joint_qk_norm_rope_kernel(
    q_out,
    k_out,
    q,
    k,
    q_scale,
    k_scale,
    cos,
    sin,
    batch_stride,
    token_stride,
    head_stride,
    angle_stride,
    out_batch,
    start,
    eps,
    heads: tl.constexpr,
    group: tl.constexpr,
):
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = q_out.dtype.element_ty
    head = (tl.program_id(1) * group + tl.arange(0, group)[:, None]).to(tl.int64)
    channel = tl.arange(0, 128)[None, :]
    inside = head < heads
    source = batch * batch_stride + token * token_stride + head * head_stride + channel
    target = batch * out_batch + ((start + token) * heads + head) * 128 + channel

    angle = (start + token) * angle_stride + channel
    c, s = tl.load(cos + angle), tl.load(sin + angle)
    for_q = widen(tl.load(q_scale + channel))
    for_k = widen(tl.load(k_scale + channel))
    q_tile = widen(tl.load(q + source, mask=inside, other=0.0))
    k_tile = widen(tl.load(k + source, mask=inside, other=0.0))
    tl.store(q_out + target, _norm_and_rotate(q_tile, for_q, c, s, eps, dtype, group), mask=inside)
    tl.store(k_out + target, _norm_and_rotate(k_tile, for_k, c, s, eps, dtype, group), mask=inside)


def _plan(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *first: Tensor,
) -> Callable[..., tuple[Tensor, Tensor]]:
    new = allocator((q.shape[0], len(cos), *q.shape[2:]), q.dtype, q.device)
    launch_first = _launch(first[0], cos, eps, start=0) if first else None
    launch = _launch(q, cos, eps, start=len(cos) - q.shape[1])

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, q_scale, k_scale, cos, sin, _, *first = args
        q_out, k_out = new(), new()
        if launch_first is not None:
            launch_first(q_out, k_out, *first, cos, sin)
        launch(q_out, k_out, q, k, q_scale, k_scale, cos, sin)
        return q_out, k_out

    return run


def _launch(q: Tensor, cos: Tensor, eps: float, *, start: int) -> Launch:
    """Turns q, and k like it, into the tokens of the outputs from `start` on."""
    batch, tokens, heads, channels = q.shape
    return Launch(
        _joint_qk_norm_rope_kernel,
        (tokens, triton.cdiv(heads, _GROUP), batch),
        *head_strides(q),
        cos.stride(0),
        len(cos) * heads * channels,
        start,
        eps,
        heads=heads,
        group=_GROUP,
    )


def _refuses(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *first: Tensor,
) -> str:
    rows, weights = {"q": q, "k": k}, {"q_scale": q_scale, "k_scale": k_scale}
    if q.dim() != 4 or q.shape[3] != _HEAD_DIM:
        return f"q: shape {tuple(q.shape)}, not (B, L, H, {_HEAD_DIM})"
    if (q.shape, q.stride()) != (k.shape, k.stride()):
        return "q and k differ in shape or strides"
    tokens = q.shape[1]
    if first:
        first_q, first_k, first_q_scale, first_k_scale = first
        rows |= {"first q": first_q, "first k": first_k}
        weights |= {"first q_scale": first_q_scale, "first k_scale": first_k_scale}
        if first_q.dim() != 4 or (first_q.shape[0], *first_q.shape[2:]) != (q.shape[0], *q.shape[2:]):
            return f"first q: shape {tuple(first_q.shape)} before {tuple(q.shape)}"
        if (first_q.shape, first_q.stride()) != (first_k.shape, first_k.stride()):
            return "first q and first k differ in shape or strides"
        tokens += first_q.shape[1]
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or table.shape != (tokens, _HEAD_DIM):
            return f"{name}: {table.dtype} {tuple(table.shape)}, not fp32 ({tokens}, {_HEAD_DIM})"
        if table.stride(1) != 1 or table.stride() != cos.stride():
            return f"{name}: strides {table.stride()}"
    return refuse_norm(eps, _HEAD_DIM, q.dtype, rows, weights)


def _shorten(*args: Any) -> tuple[Any, ...]:
    q, k, q_scale, k_scale, cos, sin, eps, *first = first_rows(*args)
    tokens = q.shape[1] + (first[0].shape[1] if first else 0)
    return q, k, q_scale, k_scale, cos[:tokens], sin[:tokens], eps, *first


def bytes_moved(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *first: Tensor,
) -> int:
    """Bytes that must pass between memory and chip: q and k in and out, the rest once."""
    heads = (q, k, *first[:2])
    once = (q_scale, k_scale, cos, sin, *first[2:])
    return 2 * sum(tensor.nbytes for tensor in heads) + sum(tensor.nbytes for tensor in once)


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=_shorten)
