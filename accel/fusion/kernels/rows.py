# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
"""Whole rows in registers: a row of D channels is a tuple of tiles of 512.

Of every tile, thread t of 128 has the four neighbours that start at column 4 t, as in ATen's row
kernels. Columns from D on hold zero.
"""

import triton
import triton.language as tl

from accel.fusion.kernels.rounding import round_to, store_as, widen

TILE = tl.constexpr(512)


@triton.jit
def load_row(pointer, offset, width: tl.constexpr):
    """The `width` neighbours from pointer + offset on, in their storage dtype; () for no pointer."""
    row = ()
    if pointer is not None:
        for step in tl.static_range((width + TILE - 1) // TILE):
            column = step * TILE + tl.arange(0, TILE)
            row = row + (tl.load(pointer + offset + column, mask=column < width, other=0.0),)  # noqa: RUF005
    return row


@triton.jit
def store_row(pointer, offset, row, width: tl.constexpr):
    """Store an fp32 row, rounded to the dtype of `pointer`, from pointer + offset on."""
    for step in tl.static_range(len(row)):
        column = step * TILE + tl.arange(0, TILE)
        value = store_as(row[step], pointer.dtype.element_ty)
        tl.store(pointer + offset + column, value, mask=column < width)


@triton.jit
def residual_row(x, gate, a, b, dtype: tl.constexpr):
    """fp32 r(x + r(gate * r(a + b))) of rows in storage dtype.

    With () for gate, b or both, what is left of it; with () for a, x.
    """
    row = ()
    for step in tl.static_range(len(x)):
        value = widen(x[step])
        if len(a) > 0:
            branch = widen(a[step])
            if len(b) > 0:
                branch = round_to(branch + widen(b[step]), dtype)
            if len(gate) > 0:
                branch = round_to(widen(gate[step]) * branch, dtype)
            value = round_to(value + branch, dtype)
        row = row + (value,)  # noqa: RUF005
    return row


@triton.jit
def normed_row(row, centre, inverse, dtype: tl.constexpr):
    """fp32 r(inverse * (row - centre)) of an fp32 row."""
    normed = ()
    for step in tl.static_range(len(row)):
        normed = normed + (round_to(inverse * (row[step] - centre), dtype),)  # noqa: RUF005
    return normed


@triton.jit
def modulated_row(normed, shift, scale, dtype: tl.constexpr):
    """fp32 r(r(1 + scale) * normed) + shift, still to be rounded; shift and scale in storage dtype.

    The normed row itself where scale is ().
    """
    if len(scale) == 0:
        return normed
    else:  # noqa: RET505
        row = ()
        for step in tl.static_range(len(normed)):
            product = round_to(round_to(1.0 + widen(scale[step]), dtype) * normed[step], dtype)
            row = row + (product + widen(shift[step]),)  # noqa: RUF005
        return row
