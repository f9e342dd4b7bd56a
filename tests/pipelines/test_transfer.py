"""Values on their way to a device and back; what only a GPU can show is in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from pipelines.transfer import read_back, upload

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_the_copy_has_the_bits_and_strides_of_an_ordinary_cast(dtype: torch.dtype | None) -> None:
    values = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).transpose(0, 2)
    copy, expected = upload(values, CPU, dtype=dtype), values.to(dtype or values.dtype)
    assert copy.dtype == expected.dtype
    assert copy.stride() == expected.stride()
    assert torch.equal(copy, expected)


def test_the_source_may_be_written_to_afterwards() -> None:
    values = torch.arange(4)
    copy = upload(values, CPU)
    values.zero_()
    assert copy.tolist() == [0, 1, 2, 3]


def test_a_default_device_of_the_caller_does_not_matter() -> None:
    with torch.device("meta"):
        copy = upload(torch.arange(4, device="cpu"), CPU)
    assert copy.tolist() == [0, 1, 2, 3]


def test_what_is_on_the_cpu_is_read_back_without_a_copy() -> None:
    values = torch.randn(1, 3, 40, 200, 200).transpose(1, 2)  # larger than the buffer that a device needs
    assert read_back(values).data_ptr() == values.data_ptr()
