# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""residual_rms_norm_modulate: h = r(x + r(gate * branch)); n = r(rms_norm(h)); y = modulate(n).

rms_norm(h) = h * rsqrt(mean(h * h) + eps) in fp32; modulate(n) = r(r(r(1 + scale) * n) + shift), r rounding
to the storage dtype. One program of 128 threads per row, which stays in registers. The kernel serves
rms_norm_modulate too, where h is x.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.compare import tensors_of
from accel.fusion.kernels.layout import refuse_rows, row_strides
from accel.fusion.kernels.row_norms import refuse_mean, rms_statistics
from accel.fusion.kernels.rows import load_row, modulated_row, normed_row, residual_row, store_row
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel
from accel.fusion.stress import first_rows


@triton.jit
def _residual_rms_norm_modulate_kernel(
    out,
    out2,
    total,
    x,
    gate,
    branch,
    shift,
    scale,
    shift2,
    scale2,
    x_batch,
    x_row,
    gate_batch,
    gate_row,
    branch_batch,
    branch_row,
    shift_batch,
    shift_row,
    scale_batch,
    scale_row,
    shift2_batch,
    shift2_row,
    scale2_batch,
    scale2_row,
    eps,
    width: tl.constexpr,
):
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    # All loads before the reduction, so that none waits for it.
    x_tiles = load_row(x, batch * x_batch + token * x_row, width)
    branch_tiles = load_row(branch, batch * branch_batch + token * branch_row, width)
    gate_tiles = load_row(gate, batch * gate_batch + token * gate_row, width)
    shift_tiles = load_row(shift, batch * shift_batch + token * shift_row, width)
    scale_tiles = load_row(scale, batch * scale_batch + token * scale_row, width)
    shift2_tiles = load_row(shift2, batch * shift2_batch + token * shift2_row, width)
    scale2_tiles = load_row(scale2, batch * scale2_batch + token * scale2_row, width)

    target = (batch * tl.num_programs(0) + token) * width
    row = residual_row(x_tiles, gate_tiles, branch_tiles, (), dtype)
    if total is not None:
        store_row(total, target, row, width)
    centre, inverse = rms_statistics(row, eps, width)
    normed = normed_row(row, centre, inverse, dtype)
    store_row(out, target, modulated_row(normed, shift_tiles, scale_tiles, dtype), width)
    if out2 is not None:
        store_row(out2, target, modulated_row(normed, shift2_tiles, scale2_tiles, dtype), width)


def plan_norm_and_modulate(
    x: Tensor,
    gate: Tensor | None,
    branch: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    shift2: Tensor | None,
    scale2: Tensor | None,
    eps: float,
) -> Callable[..., tuple[Tensor, ...]]:
    """Makes the residual sum if there is a branch; its norm, modulated if there is a scale; so with scale2.

    All contiguous (B, L, D).
    """
    batch, tokens, width = x.shape
    new = allocator(x.shape, x.dtype, x.device)
    sums, twice = branch is not None, scale2 is not None
    sources = (x, gate, branch, shift, scale, shift2, scale2)
    strides = [row_strides(x if each is None else each) for each in sources]
    kernel = _residual_rms_norm_modulate_kernel
    launch = Launch(kernel, (tokens, batch), *chain(*strides), eps, width=width)

    def run(*args: Any) -> tuple[Tensor, ...]:
        total, out, out2 = new() if sums else None, new(), new() if twice else None
        launch(out, out2, total, *args[:-1])
        return tuple(tensor for tensor in (total, out, out2) if tensor is not None)

    return run


def refuse_sources(x: Tensor, eps: float, **rows: Tensor | None) -> str:
    """Why the rows cannot be read, or the mean square not be found as ATen does; empty if all can."""
    present = {name: tensor for name, tensor in rows.items() if tensor is not None}
    for shift, scale in (("shift", "scale"), ("shift2", "scale2")):
        if (shift in present) != (scale in present):
            return f"{shift} and {scale}: one of the two is missing"
    batch, tokens, width = x.shape if x.dim() == 3 else (1, 1, 1)
    return refuse_rows(x=x, **present) or refuse_mean(batch * tokens, width, eps)


def _refuses(
    x: Tensor,
    gate: Tensor | None,
    branch: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    shift2: Tensor | None,
    scale2: Tensor | None,
    eps: float,
) -> str:
    return refuse_sources(
        x, eps, gate=gate, branch=branch, shift=shift, scale=scale, shift2=shift2, scale2=scale2
    )


def bytes_moved(*args: Any) -> int:
    """Bytes that must pass between memory and chip: every input once, the sum and the other outputs once."""
    outputs = 2 if args[6] is None else 3
    return sum(tensor.nbytes for tensor in tensors_of(args)) + outputs * int(args[0].nbytes)


KERNEL = Kernel(plan=plan_norm_and_modulate, refuses=_refuses, shorten=first_rows)
