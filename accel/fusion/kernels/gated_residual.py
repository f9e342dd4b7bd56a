# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""gated_residual: y = r(x + r(gate * r(a + b))), or r(x + r(gate * a)) without b.

r rounds to the storage dtype.
"""

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
def _gated_residual_kernel(
    out,
    x,
    gate,
    a,
    b,
    x_batch,
    x_row,
    gate_batch,
    gate_row,
    a_batch,
    a_row,
    b_batch,
    b_row,
    has_b: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    dtype: tl.constexpr = out.dtype.element_ty
    residual = widen(tl.load(x + batch * x_batch + row * x_row + column, mask=inside))
    factor = widen(tl.load(gate + batch * gate_batch + row * gate_row + column, mask=inside))
    branch = widen(tl.load(a + batch * a_batch + row * a_row + column, mask=inside))
    if has_b:
        other = widen(tl.load(b + batch * b_batch + row * b_row + column, mask=inside))
        branch = round_to(branch + other, dtype)
    gated = round_to(factor * branch, dtype)
    out_row = batch * tl.num_programs(0) + row
    tl.store(out + out_row * width + column, store_as(residual + gated, dtype), mask=inside)


def _plan(x: Tensor, gate: Tensor, a: Tensor, b: Tensor | None) -> Callable[..., Tensor]:
    new = allocator(x.shape, x.dtype, x.device)
    second = row_strides(a if b is None else b)
    launch = Launch(
        _gated_residual_kernel,
        row_grid(x.shape, _BLOCK),
        *(*row_strides(x), *row_strides(gate), *row_strides(a), *second),
        has_b=b is not None,
        width=x.shape[2],
        block=_BLOCK,
    )

    def run(x: Tensor, gate: Tensor, a: Tensor, b: Tensor | None) -> Tensor:
        out = new()
        launch(out, x, gate, a, a if b is None else b)
        return out

    return run


def _refuses(x: Tensor, gate: Tensor, a: Tensor, b: Tensor | None) -> str:
    return refuse_rows(x=x, gate=gate, a=a) if b is None else refuse_rows(x=x, gate=gate, a=a, b=b)


def bytes_moved(x: Tensor, gate: Tensor, a: Tensor, b: Tensor | None = None) -> int:
    """Bytes that must pass between memory and chip: every input once, the output once."""
    return 2 * x.nbytes + gate.nbytes + a.nbytes + (0 if b is None else b.nbytes)


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=first_rows)
