"""Equality of results down to the bit.

NaN equals NaN whatever its payload; -0.0 and +0.0 differ; dtype, shape and strides count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Mismatch:
    """The first place where a result departs from the expected one.

    where: e.g. "output 0". index: element index, empty if the whole tensor differs in kind.
    expected, actual: hexadecimal encodings, or words where `index` is empty.
    """

    where: str
    index: tuple[int, ...]
    expected: str
    actual: str

    def __str__(self) -> str:
        at = f" at {list(self.index)}" if self.index else ""
        return f"{self.where}{at}: expected {self.expected}, got {self.actual}"


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a result or argument list, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def first_mismatch(expected: Any, actual: Any, *, what: str = "output") -> Mismatch | None:
    """Compare tensors, or tuples and lists of them. Waits for the device once per tensor."""
    expected_tensors, actual_tensors = list(tensors_of(expected)), list(tensors_of(actual))
    if len(expected_tensors) != len(actual_tensors):
        counts = (f"{len(each)} tensors" for each in (expected_tensors, actual_tensors))
        return Mismatch(what, (), *counts)
    pairs = zip(expected_tensors, actual_tensors, strict=True)
    found = (_compare(f"{what} {i}", left, right) for i, (left, right) in enumerate(pairs))
    return next((mismatch for mismatch in found if mismatch is not None), None)


def _compare(where: str, expected: Tensor, actual: Tensor) -> Mismatch | None:
    if _form(expected) != _form(actual):
        return Mismatch(where, (), _form(expected), _form(actual))
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    equal = _bits(expected) == _bits(actual)
    if expected.is_floating_point():
        equal |= expected.isnan() & actual.isnan()
    if equal.all().item():
        return None
    index = tuple(int(i) for i in (~equal).nonzero()[0])
    return Mismatch(where, index, _hex(expected[index]), _hex(actual[index]))


def _form(tensor: Tensor) -> str:
    # The stride of a dimension of size 1 or of an empty tensor addresses nothing.
    strides = [
        stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and tensor.numel()
    ]
    return f"{tensor.dtype} {list(tensor.shape)} strides {strides} on {tensor.device}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _hex(element: Tensor) -> str:
    size = element.element_size()
    return f"0x{int(_bits(element).item()) & (1 << 8 * size) - 1:0{2 * size}x}"
