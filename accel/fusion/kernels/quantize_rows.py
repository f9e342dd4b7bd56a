# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""quantize_rows: scale = max(amax(|x|) * r(1 / 448), 1e-12); value = e4m3(x / scale), one program a row.

The product is what ATen makes of amax / 448 on CUDA; x / scale is a true division. Rounding to E4M3 is
integer arithmetic, the same on every architecture. ATen's clamp to 448 leaves no trace: the quotient
exceeds 448 by a few fp32 units at most, which round down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.rounding import widen
from accel.fusion.kernels.rows import TILE, load_row
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel

MAX_WIDTH = 20_480  # the widest row of FLUX 3 Action: the text encoder's layers side by side
_STRESS_ROWS = 64
_RECIPROCAL = tl.constexpr(1.0 / 448.0)
_SMALLEST_SCALE = tl.constexpr(1e-12)


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def round_to_e4m3(x):
    """fp32 of at most 448 in magnitude -> encodings of E4M3, nearest even, as uint8; NaN -> NaN.

    From 2**-6 on, the least normal number, the upper bits are E4M3 but for the bias, 127 against 7. Below,
    steps are 2**-9, as they are of fp32 numbers from 2**14 on.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    code = tl.where(magnitude < (121 << 23), shifted.to(tl.uint32, bitcast=True) - (141 << 23), normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantize_row(values, scales, row_index, row, width: tl.constexpr):
    """Store the encodings, (rows, width) uint8, and the fp32 scale of a row of bf16 tiles."""
    # Without the sign, encodings sort as the numbers do, with NaN above infinity.
    largest = tl.full((TILE,), 0, tl.int32)
    for step in tl.static_range(len(row)):
        largest = _larger(largest, row[step].to(tl.uint16, bitcast=True).to(tl.int32) & 0x7FFF)
    scale = (tl.reduce(largest, 0, _larger) << 16).to(tl.float32, bitcast=True) * _RECIPROCAL
    scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)  # NaN stays
    tl.store(scales + row_index, scale)
    for step in tl.static_range(len(row)):
        column = step * TILE + tl.arange(0, TILE)
        encodings = round_to_e4m3(tl.div_rn(widen(row[step]), scale))
        tl.store(values + row_index * width + column, encodings, mask=column < width)


@triton.jit
def _quantize_rows_kernel(values, scales, x, row_stride, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    quantize_row(values, scales, row, load_row(x, row * row_stride, width), width)


def _plan(x: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return plan_quantized(_quantize_rows_kernel, as_matrix(x), x.shape)


def as_matrix(x: Tensor) -> Tensor:
    """(..., K) as (rows, K) without a copy. Raises: RuntimeError if no one stride leads from row to row."""
    return x.view(-1, x.shape[-1])


def first_of_matrix(x: Tensor) -> tuple[Tensor]:
    """The first rows, strides kept: a piece of every sequence of a batch would be no matrix."""
    return (as_matrix(x)[:_STRESS_ROWS],)


def plan_quantized(
    kernel: Any, rows: Tensor, shape: tuple[int, ...]
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Launches `kernel`, which makes of every row of a matrix one row of E4M3 values and its fp32 scale.

    rows: the matrix. shape: of the values, (..., K).
    """
    new_values = allocator(shape, torch.float8_e4m3fn, rows.device)
    new_scales = allocator(shape[:-1], torch.float32, rows.device)
    launch = Launch(kernel, rows.shape[:1], rows.stride(0), width=shape[-1])

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        values, scales = new_values(), new_scales()
        launch(values.view(torch.uint8), scales, x)
        return values, scales

    return run


def refuse_matrix(name: str, x: Tensor, *, max_width: int) -> str:
    """Why x cannot be read row by row, or eager's output would not be contiguous; empty if neither."""
    if x.dtype != torch.bfloat16:
        return f"{name}: {x.dtype}, not bf16"
    if x.dim() == 0 or x.shape[-1] > max_width:
        return f"{name}: shape {tuple(x.shape)}, not (..., up to {max_width})"
    try:
        rows = as_matrix(x)
    except RuntimeError:
        return f"{name}: strides {x.stride()}"
    if rows.stride(1) != 1 or (rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]):
        return f"{name}: strides {x.stride()}"
    return ""


def _refuses(x: Tensor) -> str:
    return refuse_matrix("x", x, max_width=MAX_WIDTH)


def bytes_moved(x: Tensor) -> int:
    """Bytes that must pass between memory and chip: the input once, values and scales once."""
    return x.nbytes + x.numel() + 4 * x.numel() // x.shape[-1]


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=first_of_matrix)
