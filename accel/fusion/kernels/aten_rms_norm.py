# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The parts of ATen's fused RMS norm, y = r(weight * (rsqrt(sum(x * x) / N + eps) * x)).

Source: fusion spec section 3.2. A block of 128 threads holds one row; thread t takes the vectors of four
neighbours t, t + 128, ... and adds their squares one after another by fused multiply-add. Then the 32
lanes of a warp fold at distance 16, 8, 4, 2, 1. ATen takes this path only where rows and weight are
aligned to four elements and share a dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.rounding import MIN_EPS

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_VECTOR = 4
# `tl.rsqrt` flushes smaller numbers to zero, ATen's does not.


@triton.jit
def multiply_add(x, y, z):
    """x * y + z in fp32, rounded once. The interpreter's own rounds twice, hence the way through fp64."""
    if _INTERPRETED:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:  # noqa: RET505 - Triton wants both returns in one statement
        return tl.fma(x, y, z)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def add_squares(total, x, threads: tl.constexpr):
    """total (threads,) plus the squares of x, fp32, which holds four neighbours for every thread."""
    low, high = tl.split(tl.reshape(x, (threads, 2, 2)))
    first, third = tl.split(low)
    second, fourth = tl.split(high)
    total = multiply_add(first, first, total)
    total = multiply_add(second, second, total)
    total = multiply_add(third, third, total)
    return multiply_add(fourth, fourth, total)


@triton.jit
def fold_lanes(total, warps: tl.constexpr):
    """(warps * 32,) -> (warps,). Each fold reduces an axis of two, so that its order is certain."""
    lanes = tl.reshape(total, (warps, 2, 2, 2, 2, 2))
    for _ in tl.static_range(5):
        lanes = tl.reduce(lanes, 1, add)
    return lanes


def refuse_norm(
    eps: float, width: int, dtype: torch.dtype, rows: dict[str, Tensor], weights: dict[str, Tensor]
) -> str:
    """Why ATen would not normalise these rows with these weights in the order above; empty if it would."""
    for name, weight in weights.items():
        if weight.shape != (width,):
            return f"{name}: shape {tuple(weight.shape)}, not ({width},)"
    for name, tensor in {**rows, **weights}.items():
        if tensor.dtype != dtype:
            return f"{name}: {tensor.dtype}, not {dtype}"
        if tensor.stride(-1) != 1:
            return f"{name}: strides {tensor.stride()}"
        if tensor.data_ptr() % (_VECTOR * tensor.element_size()):
            return f"{name}: not aligned to {_VECTOR} elements"
    return f"eps {eps}: below the smallest normal number" if eps < MIN_EPS else ""
