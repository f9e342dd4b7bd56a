# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
"""Mean and reciprocal deviation of groups with the bits of ATen's CUDA group norm.

512 threads share a group; thread t takes the elements t, t + 512, ... by Welford's recurrence. Then the 32
lanes of each warp fold at distance 16, 8, 4, 2, 1 and the 16 warps at distance 8, 4, 2, 1. Read from the
machine code for sm_90 of torch 2.11, which says more than fusion spec section 3.4: eps and both results
are rounded to bf16.

A thread's recurrence needs nothing from its neighbours, so that the 512 may be spread over the chip, where
ATen keeps them on one multiprocessor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.aten_rms_norm import multiply_add
from accel.fusion.kernels.rounding import round_to, widen
from accel.fusion.launch import Launch, allocator

MIN_SIZE = 512  # a smaller group gets 32 threads from ATen
_THREADS = tl.constexpr(512)
# fp32 numbers a group: mean and m2 of every thread, then mean and reciprocal deviation of the group.
SCRATCH = tl.constexpr(2 * _THREADS.value + 2)
_WARPS = tl.constexpr(16)
_SHARE = tl.constexpr(64)  # threads that a program stands for
_BATCH = tl.constexpr(32)  # loads in flight: the recurrence itself waits for each


@triton.jit
def _thread_moments_kernel(scratch, x, size):
    group = tl.program_id(0).to(tl.int64)
    thread = tl.program_id(1) * _SHARE + tl.arange(0, _SHARE)
    mean = tl.full((_SHARE,), 0.0, tl.float32)
    m2 = tl.full((_SHARE,), 0.0, tl.float32)
    count = 0.0
    for first in range(0, size, _BATCH * _THREADS):
        values = ()
        for step in tl.static_range(_BATCH):
            index = first + step * _THREADS + thread
            values = values + (tl.load(x + group * size + index, mask=index < size, other=0.0),)  # noqa: RUF005
        for step in tl.static_range(_BATCH):
            inside = first + step * _THREADS + thread < size
            value = widen(values[step])
            count += 1.0
            delta = value - mean
            new_mean = mean + tl.div_rn(delta, count)
            m2 = tl.where(inside, multiply_add(delta, value - new_mean, m2), m2)
            mean = tl.where(inside, new_mean, mean)
    target = scratch + group * SCRATCH + thread
    tl.store(target, mean)
    tl.store(target + _THREADS, m2)


@triton.jit
def _fold_kernel(scratch, size, eps):
    group = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    thread = tl.arange(0, _THREADS)
    mean = tl.load(group + thread)
    m2 = tl.load(group + _THREADS + thread)
    count = ((size + _THREADS - 1 - thread) // _THREADS).to(tl.float32)
    mean, m2, count = _fold(mean, m2, count, _WARPS, 5)
    mean, m2, count = _fold(mean, m2, count, 1, 4)
    target = group + 2 * _THREADS + tl.arange(0, 1)
    tl.store(target, round_to(mean, tl.bfloat16))
    variance = tl.div_rn(m2, count) + round_to(tl.full((1,), eps, tl.float32), tl.bfloat16)
    tl.store(target + 1, round_to(tl.rsqrt(variance), tl.bfloat16))


@triton.jit
def _fold(mean, m2, count, rows: tl.constexpr, times: tl.constexpr):
    """Moments of (rows * 2**times,) sets of values -> of (rows,): the upper half of a row joins the lower."""
    for _ in tl.static_range(times):
        mean, other_mean = _halves(mean, rows)
        m2, other_m2 = _halves(m2, rows)
        count, other_count = _halves(count, rows)
        delta = other_mean - mean
        total = count + other_count
        weight = tl.div_rn(other_count, total)
        mean = multiply_add(delta, weight, mean)
        m2 = multiply_add(delta * delta * count, weight, m2 + other_m2)
        count = total
    return mean, m2, count


@triton.jit
def _halves(x, rows: tl.constexpr):
    """(rows * width,) -> lower and upper half of each row, (rows * width / 2,) each."""
    half: tl.constexpr = x.shape[0] // rows // 2
    low, high = tl.split(tl.permute(tl.reshape(x, (rows, 2, half)), (0, 2, 1)))
    return tl.reshape(low, (rows * half,)), tl.reshape(high, (rows * half,))


def plan_group_statistics(x: Tensor, groups: int, eps: float) -> Callable[[Tensor], Tensor]:
    """Mean and 1 / sqrt(variance + eps) of every group of channels, rounded to bf16.

    x: bf16 (B, C, ...), groups of at least `MIN_SIZE` elements. What is returned takes a tensor like x,
    contiguous, and returns fp32 (B * groups, `SCRATCH`), of which the last two columns are the statistics.
    """
    count = x.shape[0] * groups
    size = x.numel() // count
    new = allocator((count, SCRATCH.value), torch.float32, x.device)
    find_moments = Launch(_thread_moments_kernel, (count, _THREADS.value // _SHARE.value), size, num_warps=1)
    fold = Launch(_fold_kernel, (count,), size, eps)

    def run(x: Tensor) -> Tensor:
        scratch = new()
        find_moments(scratch, x)
        fold(scratch)
        return scratch

    return run
