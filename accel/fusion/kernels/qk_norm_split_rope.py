# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""qk_norm_split_rope: norm over all heads and split rotation, of q and k in one launch if they share tables.

n = r(weight * (x * rsqrt(sum(x * x) / N + eps))), the sum in ATen's order and the division IEEE; for
channels f and s = f + d / 2 of a head: y_f = r(fma(-sin, n_s, n_f * cos)), y_s = r(fma(sin, n_f, n_s * cos)).
r rounds to the storage dtype, the products n * cos to fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.aten_rms_norm import add, add_squares, fold_lanes, multiply_add, refuse_norm
from accel.fusion.kernels.layout import head_strides, refuse_rows, row_strides
from accel.fusion.kernels.rounding import round_to, store_as, widen
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel
from accel.fusion.stress import first_rows

_MAX_WIDTH = 8192
_PAIRS = 512  # channel pairs a program turns at a time


@triton.jit
def _inverse_rms(row, eps, width: tl.constexpr):
    """1 / rms of `width` numbers. The missing vectors of a last round add zeros, which changes no sum."""
    squares = tl.full((128,), 0.0, tl.float32)
    for start in tl.static_range(0, width, 512):
        column = start + tl.arange(0, 512)
        x = widen(tl.load(row + column, mask=column < width, other=0.0))
        squares = add_squares(squares, x, 128)
    warps = tl.reshape(fold_lanes(squares, 4), (2, 2))
    total = tl.reduce(tl.reduce(warps, 0, add), 0, add)
    return tl.rsqrt(tl.div_rn(total, width * 1.0) + eps)


@triton.jit
def _rotate(out, row, weight, inverse_rms, cos, sin, first, second, inside):
    """Normalise and turn the channels `first` and `second` of a row."""
    dtype: tl.constexpr = out.dtype.element_ty
    x = widen(tl.load(row + first, mask=inside))
    y = widen(tl.load(row + second, mask=inside))
    x = round_to(widen(tl.load(weight + first, mask=inside)) * (inverse_rms * x), dtype)
    y = round_to(widen(tl.load(weight + second, mask=inside)) * (inverse_rms * y), dtype)
    tl.store(out + first, store_as(multiply_add(-1.0 * sin, y, x * cos), dtype), mask=inside)
    tl.store(out + second, store_as(multiply_add(sin, x, y * cos), dtype), mask=inside)


@triton.jit
def _qk_norm_split_rope_kernel(
    q_out,
    k_out,
    q,
    k,
    q_scale,
    k_scale,
    cos,
    sin,
    q_batch,
    q_row,
    k_batch,
    k_row,
    angle_batch,
    angle_head,
    angle_token,
    eps,
    both: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    pairs: tl.constexpr,
):
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    out_row = (batch * tl.num_programs(0) + token) * width
    q += batch * q_batch + token * q_row
    q_inverse_rms = _inverse_rms(q, eps, width)
    if both:
        k += batch * k_batch + token * k_row
        k_inverse_rms = _inverse_rms(k, eps, width)
    for start in tl.static_range(0, width // 2, pairs):
        pair = start + tl.arange(0, pairs)
        inside = pair < width // 2
        head, channel = pair // half, pair % half
        angle = batch * angle_batch + token * angle_token + head.to(tl.int64) * angle_head + channel
        c, s = tl.load(cos + angle, mask=inside), tl.load(sin + angle, mask=inside)
        first = head * (2 * half) + channel
        second = first + half
        _rotate(q_out + out_row, q, q_scale, q_inverse_rms, c, s, first, second, inside)
        if both:
            _rotate(k_out + out_row, k, k_scale, k_inverse_rms, c, s, first, second, inside)


def _plan(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    eps: float,
) -> Callable[..., tuple[Tensor, Tensor]]:
    new_q, new_k = (allocator(x.shape, x.dtype, x.device) for x in (q, k))
    launch_q = _launch(cos, eps, q, k if k_cos is None else None)
    launch_k = None if k_cos is None else _launch(k_cos, eps, k)

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, q_scale, k_scale, cos, sin, k_cos, k_sin, _ = args
        q_out, k_out = new_q(), new_k()
        if launch_k is None:
            launch_q(q_out, k_out, q, k, q_scale, k_scale, cos, sin)
        else:
            launch_q(q_out, q_out, q, q, q_scale, q_scale, cos, sin)
            launch_k(k_out, k_out, k, k, k_scale, k_scale, k_cos, k_sin)
        return q_out, k_out

    return run


def _launch(cos: Tensor, eps: float, one: Tensor, two: Tensor | None = None) -> Launch:
    """For the outputs, inputs and weights of one or two that turn by the same angles; of one, each twice."""
    batch, tokens, width = one.shape
    return Launch(
        _qk_norm_split_rope_kernel,
        (tokens, batch),
        *row_strides(one),
        *row_strides(one if two is None else two),
        *head_strides(cos),
        eps,
        both=two is not None,
        width=width,
        half=cos.shape[3],
        pairs=_PAIRS,
    )


def _refuses(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    eps: float,
) -> str:
    unwalkable = refuse_rows(q=q) or refuse_rows(k=k)
    if unwalkable:
        return unwalkable
    batch, _, width = q.shape
    if (k.shape[0], k.shape[2]) != (batch, width):
        return f"k: shape {tuple(k.shape)} against {tuple(q.shape)}"
    if width % 4 or width > _MAX_WIDTH:
        return f"q: width {width}, not a multiple of 4 up to {_MAX_WIDTH}"
    if (k_cos is None) != (k_sin is None):
        return "k_cos and k_sin: one without the other"
    for_k = {"cos": cos, "sin": sin} if k_cos is None or k_sin is None else {"k_cos": k_cos, "k_sin": k_sin}
    return (
        _refuse_angles(q, cos=cos, sin=sin)
        or _refuse_angles(k, **for_k)
        or refuse_norm(eps, width, q.dtype, {"q": q, "k": k}, {"q_scale": q_scale, "k_scale": k_scale})
    )


def _refuse_angles(x: Tensor, **tables: Tensor) -> str:
    """Why the tables cannot turn x (B, L, H * d); empty if they are alike and fp32 (B, H, L, d / 2)."""
    batch, tokens, width = x.shape
    strides = next(iter(tables.values())).stride()
    for name, table in tables.items():
        if table.dtype != torch.float32 or table.dim() != 4:
            return f"{name}: {table.dtype} of {table.dim()} dimensions, not fp32 of 4"
        _, heads, _, half = table.shape
        if table.shape != (batch, heads, tokens, half) or 2 * heads * half != width:
            return f"{name}: shape {tuple(table.shape)} for {tuple(x.shape)}"
        if table.stride(3) != 1 or table.stride() != strides:
            return f"{name}: strides {table.stride()}"
    return ""


def _shorten(*args: Any) -> tuple[Any, ...]:
    q, k, q_scale, k_scale, *tables, eps = args
    tokens_first = [table if table is None else table.transpose(1, 2) for table in tables]
    short = [table if table is None else table.transpose(1, 2) for table in first_rows(*tokens_first)]
    return (*first_rows(q, k), q_scale, k_scale, *short, eps)


def bytes_moved(*args: Any) -> int:
    """Bytes that must pass between memory and chip: q and k in and out, weights and tables once."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return sum(tensor.nbytes for tensor in (*args[:2], *tensors))


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=_shorten)
