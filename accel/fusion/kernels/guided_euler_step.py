# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""guided_euler_step: v = r(uncond + r(guidance * r(cond - uncond))), y = r(sample + r(r(delta) * v)).

r rounds to the dtype of cond; sums and products are fp32. A scalar tensor on the device is rounded to
the dtype of the tensor that it multiplies, a Python number is not (fusion spec section 2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.rounding import round_to, store_as, widen
from accel.fusion.launch import Launch
from accel.fusion.site import Kernel

_MAX_BLOCK = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _guided_euler_step_kernel(
    out,
    sample,
    cond,
    uncond,
    delta,
    guidance,
    rows,
    columns,
    sample_batch,
    sample_row,
    sample_column,
    cond_batch,
    cond_row,
    cond_column,
    uncond_batch,
    uncond_row,
    uncond_column,
    guided: tl.constexpr,
    block: tl.constexpr,
):
    row, batch = tl.program_id(0).to(tl.int64) % rows, tl.program_id(0).to(tl.int64) // rows
    column = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    inside = column < columns
    here = batch * sample_batch + row * sample_row + column * sample_column
    there = batch * cond_batch + row * cond_row + column * cond_column
    dtype: tl.constexpr = out.dtype.element_ty
    velocity = widen(tl.load(cond + there, mask=inside))
    if guided:
        from_uncond = batch * uncond_batch + row * uncond_row + column * uncond_column
        base = widen(tl.load(uncond + from_uncond, mask=inside))
        difference = round_to(velocity - base, dtype)
        velocity = round_to(base + round_to(guidance * difference, dtype), dtype)
    step = round_to(round_to(tl.load(delta), dtype) * velocity, dtype)
    start = widen(tl.load(sample + here, mask=inside))
    tl.store(out + here, store_as(start + step, dtype), mask=inside)


def _plan(
    sample: Tensor, cond: Tensor, uncond: Tensor | None, guidance: float, delta: Tensor
) -> Callable[..., Tensor]:
    tensors = [_as_rows(tensor) for tensor in (sample, cond, cond if uncond is None else uncond)]
    batch, rows, columns = tensors[0].shape
    block = min(_MAX_BLOCK, triton.next_power_of_2(columns))
    launch = Launch(
        _guided_euler_step_kernel,
        (batch * rows, triton.cdiv(columns, block)),
        *(guidance, rows, columns),
        *(stride for tensor in tensors for stride in tensor.stride()),
        guided=uncond is not None,
        block=block,
    )

    def run(sample: Tensor, cond: Tensor, uncond: Tensor | None, _: float, delta: Tensor) -> Tensor:
        out = torch.empty_like(sample, dtype=cond.dtype)  # in the memory order of the sample
        launch(out, sample, cond, cond if uncond is None else uncond, delta)
        return out

    return run


def _as_rows(tensor: Tensor) -> Tensor:
    """Three dimensions: (B, L, C) as they are, other shapes in one row."""
    return tensor if tensor.dim() == 3 else tensor.view(1, 1, -1)


def _refuses(sample: Tensor, cond: Tensor, uncond: Tensor | None, guidance: float, delta: Tensor) -> str:
    if delta.dtype != torch.float32 or delta.dim() != 0:
        return f"delta: {delta.dtype} of {delta.dim()} dimensions, not an fp32 scalar"
    if cond.dtype not in _DTYPES or cond.dim() == 0:
        return f"cond: {cond.dtype} of {cond.dim()} dimensions"
    if sample.dtype not in (cond.dtype, torch.float32):
        return f"sample: {sample.dtype}, neither fp32 nor {cond.dtype}"
    if uncond is not None and uncond.dtype != cond.dtype:
        return f"uncond: {uncond.dtype}, not {cond.dtype}"
    for name, tensor in (("sample", sample), ("cond", cond), ("uncond", uncond)):
        if tensor is None:
            continue
        if tensor.shape != cond.shape:
            return f"{name}: shape {tuple(tensor.shape)} against {tuple(cond.shape)}"
        if tensor.dim() != 3 and not tensor.is_contiguous():
            return f"{name}: strides {tensor.stride()}"
    if not _is_dense(sample):
        return f"sample: strides {sample.stride()}"
    return ""


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order: then eager's result has that order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def bytes_moved(sample: Tensor, cond: Tensor, uncond: Tensor | None, guidance: float, delta: Tensor) -> int:
    """Bytes that must pass between memory and chip: every input once, the output once."""
    return sample.nbytes + 2 * cond.nbytes + (0 if uncond is None else uncond.nbytes)


KERNEL = Kernel(plan=_plan, refuses=_refuses)
