# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""group_norm_silu: y = r(n / (1 + exp(-n))), n = r(fma(a, x, b)), r rounding to bf16.

a = rstd * weight and b = bias - a * mean are fp32, every operation rounded, mean and rstd from
`aten_group_norm`. Bytes, in sizes of x: 3 against 5 in eager.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.aten_group_norm import MIN_SIZE, SCRATCH, plan_group_statistics
from accel.fusion.kernels.aten_rms_norm import multiply_add
from accel.fusion.kernels.rounding import MIN_EPS, round_to, store_as, widen
from accel.fusion.launch import Launch, allocator
from accel.fusion.site import Kernel

_BLOCK = 2048
_MAX_GROUP = 2**30  # elements, so that int32 counts them


@triton.jit
def _group_norm_silu_kernel(
    out,
    x,
    scratch,
    weight,
    bias,
    channels,
    group_channels,
    pixels,
    blocks,
    block: tl.constexpr,
):
    plane = tl.program_id(0) // blocks
    pixel = tl.program_id(0) % blocks * block + tl.arange(0, block)
    group, channel = plane // group_channels, plane % channels
    mean = scratch + group.to(tl.int64) * SCRATCH + (SCRATCH - 2)
    slope = tl.load(mean + 1) * widen(tl.load(weight + channel))
    intercept = widen(tl.load(bias + channel)) - tl.load(mean) * slope

    index = plane.to(tl.int64) * pixels + pixel
    value = widen(tl.load(x + index, mask=pixel < pixels, other=0.0))
    normed = round_to(multiply_add(slope, value, intercept), tl.bfloat16)
    silu = normed / (1.0 + tl.exp(-normed))
    tl.store(out + index, store_as(silu, tl.bfloat16), mask=pixel < pixels)


def _plan(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Callable[..., Tensor]:
    new = allocator(x.shape, x.dtype, x.device)
    statistics = plan_group_statistics(x, groups, eps)
    batch, channels = x.shape[:2]
    pixels = x.shape[2:].numel()
    blocks = triton.cdiv(pixels, _BLOCK)
    sizes = channels, channels // groups, pixels, blocks
    launch = Launch(_group_norm_silu_kernel, (batch * channels * blocks,), *sizes, block=_BLOCK)

    def run(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = x.contiguous()  # as eager does on CUDA, whose result is contiguous then too
        out = new()
        launch(out, x, statistics(x), weight, bias)
        return out

    return run


def _refuses(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> str:
    if x.dim() < 3:
        return f"x: shape {tuple(x.shape)}"
    channels, pixels = x.shape[1], x.shape[2:].numel()
    if channels % groups:
        return f"x: {channels} channels in {groups} groups"
    if pixels < MIN_SIZE or channels // groups * pixels > _MAX_GROUP:
        return f"x: {pixels} pixels, not {MIN_SIZE} or more in groups of at most {_MAX_GROUP} elements"
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor.dtype != torch.bfloat16:
            return f"{name}: {tensor.dtype}, not bf16"
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor.shape != (channels,) or not tensor.is_contiguous():
            return f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return "" if eps >= MIN_EPS else f"eps {eps}: `tl.rsqrt` flushes subnormal numbers"


def _shorten(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, int, Tensor, Tensor, float]:
    """Groups of one channel and one row of pixels: a pattern would else spoil groups it shares."""
    rows = x.flatten(2)[:, :groups, : 4 * MIN_SIZE]
    return rows.contiguous().unsqueeze(2), groups, weight[:groups], bias[:groups], eps


def bytes_moved(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> int:
    """Bytes that must pass between memory and chip: the input twice, the output once."""
    return 3 * x.nbytes + weight.nbytes + bias.nbytes


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=_shorten)
