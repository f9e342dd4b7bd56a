# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""swiglu_concat: y = [first | r(r(gate / (1 + exp(-gate))) * value)], r rounding to bf16.

The right part is that of `accel.fusion.kernels.swiglu`, whose proof over all encodings it shares.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.layout import refuse_rows, row_strides
from accel.fusion.kernels.rounding import round_to, store_as, widen
from accel.fusion.kernels.swiglu import KERNEL as SWIGLU
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel
from accel.fusion.stress import first_rows

_BLOCK = 1024


@triton.jit
def _swiglu_concat_kernel(
    out,
    first,
    packed,
    first_batch,
    first_row,
    packed_batch,
    packed_row,
    first_width: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    tile, copied_tiles = tl.program_id(1), (first_width + block - 1) // block
    target = out + (batch * tl.num_programs(0) + row) * (first_width + width)
    dtype: tl.constexpr = out.dtype.element_ty
    if tile < copied_tiles:
        column = tile * block + tl.arange(0, block)
        inside = column < first_width
        copied = tl.load(first + batch * first_batch + row * first_row + column, mask=inside)
        tl.store(target + column, copied, mask=inside)
    else:
        column = (tile - copied_tiles) * block + tl.arange(0, block)
        inside = column < width
        start = packed + batch * packed_batch + row * packed_row
        gate = widen(tl.load(start + column, mask=inside))
        value = widen(tl.load(start + width + column, mask=inside))
        silu = round_to(gate / (1.0 + tl.exp(-gate)), dtype)
        tl.store(target + first_width + column, store_as(silu * value, dtype), mask=inside)


def _plan(first: Tensor, packed: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    batch, rows, first_width = first.shape
    width = packed.shape[2] // 2
    new = allocator((batch, rows, first_width + width), first.dtype, first.device)
    tiles = triton.cdiv(first_width, _BLOCK) + triton.cdiv(width, _BLOCK)
    strides = (*row_strides(first), *row_strides(packed))
    constants = {"first_width": first_width, "width": width, "block": _BLOCK}
    launch = Launch(_swiglu_concat_kernel, (rows, tiles, batch), *strides, **constants)

    def run(first: Tensor, packed: Tensor) -> Tensor:
        out = new()
        launch(out, first, packed)
        return out

    return run


def _refuses(first: Tensor, packed: Tensor) -> str:
    unwalkable = refuse_rows(first=first) or refuse_rows(packed=packed)
    if unwalkable:
        return unwalkable
    if (packed.dtype, packed.shape[:2]) != (first.dtype, first.shape[:2]):
        return f"packed: {packed.dtype} {tuple(packed.shape)} beside {first.dtype} {tuple(first.shape)}"
    return f"packed: odd width {packed.shape[2]}" if packed.shape[2] % 2 else ""


def _proof(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every encoding as the gate, with value 1, beside some that are copied."""
    assert SWIGLU.proof is not None
    (packed,) = SWIGLU.proof(dtype, device)
    return packed[..., :8], packed


def bytes_moved(first: Tensor, packed: Tensor) -> int:
    """Bytes that must pass between memory and chip: both inputs once, the output once."""
    return 2 * first.nbytes + packed.nbytes + packed.nbytes // 2


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=first_rows, proof=_proof)
