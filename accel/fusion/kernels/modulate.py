# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""modulate: y = r(r(r(1 + scale) * normed) + shift), r rounding to the storage dtype."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.layout import refuse_rows, row_grid, row_strides
from accel.fusion.kernels.rounding import round_to, store_as, widen
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel
from accel.fusion.stress import first_rows

_BLOCK = 1024


@triton.jit
def _modulate_kernel(
    out,
    normed,
    shift,
    scale,
    normed_batch,
    normed_row,
    shift_batch,
    shift_row,
    scale_batch,
    scale_row,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    dtype: tl.constexpr = out.dtype.element_ty
    n = widen(tl.load(normed + batch * normed_batch + row * normed_row + column, mask=inside))
    b = widen(tl.load(shift + batch * shift_batch + row * shift_row + column, mask=inside))
    a = widen(tl.load(scale + batch * scale_batch + row * scale_row + column, mask=inside))
    product = round_to(round_to(1.0 + a, dtype) * n, dtype)
    out_row = batch * tl.num_programs(0) + row
    tl.store(out + out_row * width + column, store_as(product + b, dtype), mask=inside)


def _plan(normed: Tensor, shift: Tensor, scale: Tensor) -> Callable[..., Tensor]:
    new = allocator(normed.shape, normed.dtype, normed.device)
    strides = (*row_strides(normed), *row_strides(shift), *row_strides(scale))
    grid = row_grid(normed.shape, _BLOCK)
    launch = Launch(_modulate_kernel, grid, *strides, width=normed.shape[2], block=_BLOCK)

    def run(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        out = new()
        launch(out, normed, shift, scale)
        return out

    return run


def _refuses(normed: Tensor, shift: Tensor, scale: Tensor) -> str:
    return refuse_rows(normed=normed, shift=shift, scale=scale)


def bytes_moved(normed: Tensor, shift: Tensor, scale: Tensor) -> int:
    """Bytes that must pass between memory and chip: every input once, the output once."""
    return 2 * normed.nbytes + shift.nbytes + scale.nbytes


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=first_rows)
