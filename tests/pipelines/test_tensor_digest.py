"""Digests tell apart what `torch.equal` tells apart, and shapes and dtypes besides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipelines.tensor_digest import tensor_digest

ROW = torch.arange(6, dtype=torch.float32)


def test_layout_does_not_matter() -> None:
    spread = torch.empty(6, 2)[:, 0].copy_(ROW)
    assert not spread.is_contiguous()
    assert tensor_digest({"a": [spread]}) == tensor_digest((ROW,))


@pytest.mark.parametrize(
    "other",
    [ROW.view(2, 3), ROW.to(torch.float64), ROW.view(torch.int32), ROW.flip(0), ROW[:5], torch.tensor(1.0)],
    ids=["shape", "dtype", "same bytes", "order", "length", "scalar"],
)
def test_differences_show(other: Tensor) -> None:
    assert tensor_digest(other) != tensor_digest(ROW)
    assert tensor_digest(other) == tensor_digest(other.clone())


def test_the_sign_of_zero_and_the_bits_of_nan_count() -> None:
    zeros, nans = torch.tensor([0.0, -0.0]), torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    assert tensor_digest(zeros[0]) != tensor_digest(zeros[1])
    assert tensor_digest(nans[0].view(torch.float32)) != tensor_digest(nans[1].view(torch.float32))
