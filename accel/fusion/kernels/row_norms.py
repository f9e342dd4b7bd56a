# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Statistics of a row with the bits of ATen's CUDA kernels (fusion spec sections 3.1, 3.3 and 12).

Rows are those of `accel.fusion.kernels.rows`, widened to fp32. The statistics are two fp32 values,
(centre, inverse): the normed row is inverse * (row - centre).
"""

import triton
import triton.language as tl

from accel.fusion.kernels.aten_rms_norm import fold_lanes, multiply_add
from accel.fusion.kernels.rounding import MIN_EPS
from accel.fusion.kernels.rows import TILE

_THREADS = tl.constexpr(128)
_LANES = tl.constexpr(32)

# The least normal fp32 number: `tl.rsqrt` flushes smaller ones to zero, ATen does not.
_MIN_REDUCED_ROWS = 16
_MIN_RMS_WIDTH, _MAX_RMS_WIDTH = 128, 8160
_MAX_LAYER_NORM_WIDTH = 8192
_FP32_INTEGERS = 2**24  # up to here fp32 holds every integer


@triton.jit
def layer_norm_statistics(row, eps, width: tl.constexpr):
    """Mean and 1 / sqrt(variance + eps), as `layer_norm` finds them.

    Every thread runs Welford's recurrence over its columns in ascending order. Then threads fold at
    distance 16, 8, 4, 2, 1 within each of the four warps, and the warps at distance 2, 1.
    """
    column = 4 * tl.arange(0, _THREADS)
    mean = tl.full((_THREADS,), 0.0, tl.float32)
    m2 = tl.full((_THREADS,), 0.0, tl.float32)
    count = tl.full((_THREADS,), 0.0, tl.float32)
    for step in tl.static_range(len(row)):
        first, second, third, fourth = _columns_of_four(tl.reshape(row[step], (_THREADS, 4)))
        new_mean, new_m2 = _welford(first, mean, m2, 4 * step + 1)
        new_mean, new_m2 = _welford(second, new_mean, new_m2, 4 * step + 2)
        new_mean, new_m2 = _welford(third, new_mean, new_m2, 4 * step + 3)
        new_mean, new_m2 = _welford(fourth, new_mean, new_m2, 4 * step + 4)
        # A thread past the end keeps what it has and enters the fold with a smaller count.
        inside = step * TILE + column < width
        mean, m2 = tl.where(inside, new_mean, mean), tl.where(inside, new_m2, m2)
        count = tl.where(inside, 4.0 * (step + 1), count)
    mean, m2 = _fold_moments(mean, m2, count)
    return mean, tl.rsqrt(tl.div_rn(m2, 1.0 * width) + eps)


@triton.jit
def rms_statistics(row, eps, width: tl.constexpr):
    """Zero and 1 / sqrt(mean square + eps), the mean as `mean` finds it where `refuse_mean` allows.

    128 accumulators, four neighbours to each lane of one warp, add every 128th square in ascending
    order. A lane adds its four from left to right, then lanes fold at distance 16, 8, 4, 2, 1.
    """
    total = tl.full((4 * _LANES,), 0.0, tl.float32)
    for step in tl.static_range(len(row)):
        squares = tl.permute(tl.reshape(row[step] * row[step], (4, 4 * _LANES)), (1, 0))
        first, second, third, fourth = _columns_of_four(squares)
        total = (((total + first) + second) + third) + fourth
    first, second, third, fourth = _columns_of_four(tl.reshape(total, (_LANES, 4)))
    total = fold_lanes(((first + second) + third) + fourth, 1)
    return 0.0, tl.rsqrt(total * (1.0 / width) + eps)


@triton.jit
def _columns_of_four(x):
    """(n, 4) -> four times (n,)."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _welford(x, mean, m2, count: tl.constexpr):
    """Mean and sum of squared deviations of `count` values, x the last of them."""
    delta = x - mean
    reciprocal = tl.full(x.shape, 1.0 / count, tl.float32)
    mean = multiply_add(delta, reciprocal, mean)
    return mean, multiply_add(delta, x - mean, m2)


@triton.jit
def _fold_moments(mean, m2, count):
    """(128,) each -> mean and m2 of all. Every fold reduces an axis of two, so that its order is certain."""
    shape: tl.constexpr = (2, 2, 2, 2, 2, 2, 2)
    thread = tl.reshape(tl.arange(0, _THREADS), shape)
    moments = (tl.reshape(mean, shape), tl.reshape(m2, shape), tl.reshape(count, shape), thread)
    for _ in tl.static_range(5):
        moments = tl.reduce(moments, 2, _combine_moments)
    for _ in tl.static_range(2):
        moments = tl.reduce(moments, 0, _combine_moments)
    return moments[0], moments[1]


@triton.jit
def _combine_moments(mean_a, m2_a, count_a, thread_a, mean_b, m2_b, count_b, thread_b):
    """Moments of both sides together.

    The mean of the upper thread is the one multiplied within the FMA. Either side may be that one, since
    Triton lets two threads exchange what they have and both combine.
    """
    ordered = thread_a < thread_b
    low_mean, high_mean = tl.where(ordered, mean_a, mean_b), tl.where(ordered, mean_b, mean_a)
    low_count, high_count = tl.where(ordered, count_a, count_b), tl.where(ordered, count_b, count_a)
    count = low_count + high_count
    reciprocal = tl.div_rn(1.0, count)
    low_weight, high_weight = reciprocal * low_count, reciprocal * high_count
    delta = low_mean - high_mean
    mean = multiply_add(high_mean, high_weight, low_weight * low_mean)
    m2 = multiply_add(low_weight, high_count * (delta * delta), m2_a + m2_b)
    some = count > 0
    return tl.where(some, mean, 0.0), tl.where(some, m2, 0.0), count, tl.minimum(thread_a, thread_b)


def refuse_layer_norm(width: int, eps: float) -> str:
    """Why `layer_norm_statistics` is not what ATen computes for aligned rows; empty if it is."""
    if width % 4 or width > _MAX_LAYER_NORM_WIDTH:
        return f"x: width {width}, not a multiple of 4 up to {_MAX_LAYER_NORM_WIDTH:,}"
    return _refuse_eps(eps)


def refuse_mean(rows: int, width: int, eps: float) -> str:
    """Why `rms_statistics` is not what ATen computes for so many rows; empty if it is."""
    if rows < _MIN_REDUCED_ROWS:
        return f"x: {rows} rows; below {_MIN_REDUCED_ROWS} ATen splits a row among more threads"
    if width % 4 or not _MIN_RMS_WIDTH <= width <= _MAX_RMS_WIDTH:
        return f"x: width {width}, not a multiple of 4 from {_MIN_RMS_WIDTH} to {_MAX_RMS_WIDTH:,}"
    elements = rows * width
    if elements // (elements & -elements) >= _FP32_INTEGERS:
        return f"x: {elements} elements; ATen divides by their number, which fp32 does not hold"
    return _refuse_eps(eps)


def _refuse_eps(eps: float) -> str:
    return f"eps: {eps} is below the normal fp32 numbers" if eps < MIN_EPS else ""
