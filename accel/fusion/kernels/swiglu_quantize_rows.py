# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
"""swiglu_quantize_rows: the row r(r(gate / (1 + exp(-gate))) * value) stays in registers and is quantised.

r rounds to bf16. Both orders are told in `swiglu` and `quantize_rows`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.quantize_rows import (
    MAX_WIDTH,
    as_matrix,
    first_of_matrix,
    plan_quantized,
    quantize_row,
    refuse_matrix,
)
from accel.fusion.kernels.rounding import round_to, store_as, widen
from accel.fusion.kernels.rows import load_row
from accel.fusion.site import Kernel


@triton.jit
def _swiglu_quantize_rows_kernel(values, scales, packed, row_stride, width: tl.constexpr):
    row_index = tl.program_id(0).to(tl.int64)
    gates = load_row(packed, row_index * row_stride, width)
    factors = load_row(packed, row_index * row_stride + width, width)
    row = ()
    for step in tl.static_range(len(gates)):
        gate = widen(gates[step])
        silu = round_to(gate / (1.0 + tl.exp(-gate)), tl.bfloat16)
        row = row + (store_as(silu * widen(factors[step]), tl.bfloat16),)  # noqa: RUF005
    quantize_row(values, scales, row_index, row, width)


def _plan(packed: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    shape = (*packed.shape[:-1], packed.shape[-1] // 2)
    return plan_quantized(_swiglu_quantize_rows_kernel, as_matrix(packed), shape)


def _refuses(packed: Tensor) -> str:
    return refuse_matrix("packed", packed, max_width=2 * MAX_WIDTH) or (
        "packed: odd width" if packed.shape[-1] % 2 else ""
    )


def _proof(dtype: torch.dtype, device: torch.device) -> tuple[Tensor]:
    """Every encoding as the gate, with value 1, in a row of its own: the scale tells the magnitude."""
    encodings = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    return (torch.stack((encodings, torch.ones_like(encodings)), dim=-1),)


def bytes_moved(packed: Tensor) -> int:
    """Bytes that must pass between memory and chip: the input once, values and scales once."""
    return packed.nbytes + packed.numel() // 2 + 4 * packed.numel() // packed.shape[-1]


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=first_of_matrix, proof=_proof)
