# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""swiglu: y = r(r(gate / (1 + exp(-gate))) * value), r rounding to bf16.

`tl.exp` and the division are a few fp32 units off ATen's, which no bf16 result shows: the gate runs
all 65,536 encodings. fp16 results would show it, so fp16 is not offered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.layout import as_rows, refuse_rows, row_grid, row_strides
from accel.fusion.kernels.rounding import round_to, store_as, widen
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel
from accel.fusion.stress import first_rows

_BLOCK = 1024


@triton.jit
def _swiglu_kernel(out, packed, packed_batch, packed_row, width: tl.constexpr, block: tl.constexpr):
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    dtype: tl.constexpr = out.dtype.element_ty
    start = packed + batch * packed_batch + row * packed_row
    gate = widen(tl.load(start + column, mask=inside))
    value = widen(tl.load(start + width + column, mask=inside))
    silu = round_to(gate / (1.0 + tl.exp(-gate)), dtype)
    out_row = batch * tl.num_programs(0) + row
    tl.store(out + out_row * width + column, store_as(silu * value, dtype), mask=inside)


def _plan(packed: Tensor) -> Callable[[Tensor], Tensor]:
    rows, width = as_rows(packed), packed.shape[-1] // 2
    new = allocator((*packed.shape[:-1], width), packed.dtype, packed.device)
    grid = row_grid((*rows.shape[:2], width), _BLOCK)
    launch = Launch(_swiglu_kernel, grid, *row_strides(rows), width=width, block=_BLOCK)

    def run(packed: Tensor) -> Tensor:
        out = new()
        launch(out, packed)
        return out

    return run


def _refuses(packed: Tensor) -> str:
    return refuse_rows(packed=as_rows(packed)) or ("odd width" if packed.shape[-1] % 2 else "")


def _proof(dtype: torch.dtype, device: torch.device) -> tuple[Tensor]:
    """Every encoding as the gate, with value 1."""
    encodings = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype).view(1, 64, 1024)
    return (torch.cat((encodings, torch.ones_like(encodings)), dim=-1),)


def bytes_moved(packed: Tensor) -> int:
    """Bytes that must pass between memory and chip: the input once, the output once."""
    return packed.nbytes + packed.nbytes // 2


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=first_rows, proof=_proof)
