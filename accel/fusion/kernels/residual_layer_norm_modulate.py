# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""residual_layer_norm_modulate: h = r(x + r(gate * r(a + b))); n = r(layer_norm(h)); y = modulate(n).

modulate(n) = r(r(r(1 + scale) * n) + shift), r rounding to the storage dtype. One program of 128 threads
per row, which stays in registers. The kernel serves layer_norm_modulate too, where h is x.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.compare import tensors_of
from accel.fusion.kernels.layout import refuse_rows, row_strides
from accel.fusion.kernels.row_norms import layer_norm_statistics, refuse_layer_norm
from accel.fusion.kernels.rows import load_row, modulated_row, normed_row, residual_row, store_row
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel
from accel.fusion.stress import first_rows


@triton.jit
def _residual_layer_norm_modulate_kernel(
    out,
    total,
    x,
    gate,
    a,
    b,
    shift,
    scale,
    segment,
    x_batch,
    x_row,
    gate_batch,
    gate_row,
    a_batch,
    a_row,
    b_batch,
    b_row,
    shift_batch,
    shift_row,
    scale_batch,
    scale_row,
    eps,
    width: tl.constexpr,
):
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    index = token
    if segment is not None:
        index = tl.load(segment + token).to(tl.int64)
    # All loads before the reduction, so that none waits for it.
    x_tiles = load_row(x, batch * x_batch + token * x_row, width)
    a_tiles = load_row(a, batch * a_batch + token * a_row, width)
    b_tiles = load_row(b, batch * b_batch + token * b_row, width)
    gate_tiles = load_row(gate, batch * gate_batch + index * gate_row, width)
    shift_tiles = load_row(shift, batch * shift_batch + index * shift_row, width)
    scale_tiles = load_row(scale, batch * scale_batch + index * scale_row, width)

    target = (batch * tl.num_programs(0) + token) * width
    row = residual_row(x_tiles, gate_tiles, a_tiles, b_tiles, dtype)
    if total is not None:
        store_row(total, target, row, width)
    mean, inverse = layer_norm_statistics(row, eps, width)
    normed = normed_row(row, mean, inverse, dtype)
    store_row(out, target, modulated_row(normed, shift_tiles, scale_tiles, dtype), width)


def plan_norm_and_modulate(
    x: Tensor,
    gate: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    segment: Tensor | None,
    eps: float,
) -> Callable[..., tuple[Tensor | None, Tensor]]:
    """Makes the residual sum, `None` without a, and its norm, modulated; both contiguous (B, L, D)."""
    batch, tokens, width = x.shape
    new = allocator(x.shape, x.dtype, x.device)
    strides = [row_strides(x if each is None else each) for each in (x, gate, a, b, shift, scale)]
    sums = a is not None
    kernel = _residual_layer_norm_modulate_kernel
    launch = Launch(kernel, (tokens, batch), *chain(*strides), eps, width=width)

    def run(*args: Any) -> tuple[Tensor | None, Tensor]:
        total, out = new() if sums else None, new()
        launch(out, total, *args[:-1])
        return total, out

    return run


def refuse_modulated(x: Tensor, segment: Tensor | None, **rows: Tensor) -> str:
    """Why rows (B, L, D) or (B, 1, D), or with `segment` (B, S, D), cannot be read for every token of x."""
    if segment is None:
        return refuse_rows(x=x, **rows)
    if segment.dtype != torch.int32 or segment.shape != x.shape[1:2] or not segment.is_contiguous():
        return f"segment: {segment.dtype} {tuple(segment.shape)}, not contiguous int32 (L,)"
    one_each = {name: table[:, :1] if table.dim() == 3 else table for name, table in rows.items()}
    return refuse_rows(x=x, **one_each)


def shorten(*args: Any) -> tuple[Any, ...]:
    """`first_rows`; the table of segments stays whole while x, a, b and `segment` are cut."""
    x, gate, a, b, shift, scale, segment, eps = args
    if segment is None:
        return first_rows(*args)
    x, a, b = first_rows(x, a, b)
    return x, gate, a, b, shift, scale, segment[: x.shape[1]], eps


def _refuses(
    x: Tensor,
    gate: Tensor,
    a: Tensor,
    b: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    segment: Tensor | None,
    eps: float,
) -> str:
    branches = {"a": a} if b is None else {"a": a, "b": b}
    return (
        refuse_rows(x=x, **branches)
        or refuse_modulated(x, segment, gate=gate, shift=shift, scale=scale)
        or refuse_layer_norm(x.shape[2], eps)
    )


def bytes_moved(*args: Any) -> int:
    """Bytes that must pass between memory and chip: every input once, both outputs once."""
    return sum(tensor.nbytes for tensor in tensors_of(args)) + 2 * int(args[0].nbytes)


KERNEL = Kernel(plan=plan_norm_and_modulate, refuses=_refuses, shorten=shorten)
