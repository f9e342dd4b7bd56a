# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Rounding in the middle of a chain, as eager does by storing every result.

Compiled, a cast is one `cvt.rn` instruction, or the operation before it becomes a native bf16 one. Both
give the same bits: fp32 has more than twice the digits of bf16, so rounding an exact sum or product to
fp32 first changes nothing. The Triton interpreter truncates casts to bf16 and misreads subnormal bf16, so
there both directions work on bits.
"""

import triton
import triton.language as tl

# Below it `tl.rsqrt` flushes numbers to zero, which ATen's does not.
MIN_EPS = 2.0**-126

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_bits_to_bf16(x):
    """fp32 -> bf16, nearest even, in integer arithmetic. Every NaN becomes the canonical one.

    Adding half a unit to the canonical NaN would carry into the sign and give -0, hence the select.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def store_as(x, dtype: tl.constexpr):
    """fp32 -> `dtype`, nearest even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        return round_bits_to_bf16(x)
    else:  # noqa: RET505 - Triton wants both returns in one statement
        return x.to(dtype)


@triton.jit
def widen(x):
    """Any storage dtype -> fp32, exact."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 -> the nearest value of `dtype`, widened to fp32 again."""
    return widen(store_as(x, dtype))
