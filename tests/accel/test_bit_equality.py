"""What counts as the same bits, beside what the tests of the gate show."""

from __future__ import annotations

import math

import pytest
import torch

from accel.fusion.compare import first_mismatch


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_count_by_their_parts(dtype: torch.dtype) -> None:
    values = torch.tensor([complex(1, 2), complex(math.nan, 3), complex(0.0, 0.0)], dtype=dtype)
    assert first_mismatch(values, values.clone()) is None
    negative_zero = values.clone()
    negative_zero[2] = complex(0.0, -0.0)
    mismatch = first_mismatch(values, negative_zero)
    assert mismatch is not None
    assert mismatch.index == (2, 1)


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_a_single_bit_is_found_wherever_it_is(row: int) -> None:
    expected = torch.linspace(1, 2, 20).reshape(4, 5)
    actual = expected.clone()
    actual.view(torch.int32)[row, 4] ^= 1
    mismatch = first_mismatch([expected, expected], [expected, actual])
    assert mismatch is not None
    assert (mismatch.where, mismatch.index) == ("output 1", (row, 4))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float8_e4m3fn])
def test_dtypes_without_fractions_are_compared_too(dtype: torch.dtype) -> None:
    expected, actual = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([0, 1, 0]).to(dtype)
    mismatch = first_mismatch(expected, actual)
    assert mismatch is not None
    assert mismatch.index == (2,)
    assert first_mismatch(expected, expected.clone()) is None
