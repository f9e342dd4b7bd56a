"""Copies that keep a tensor's strides and alignment.

Eager kernels are chosen by layout as well as by shape, so the buffers a graph reads, and the
results it hands out, have the layout that eager would have seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from accel.graphs.tree import misalignment


def empty_like_layout(tensor: Tensor) -> Tensor:
    """An uninitialised tensor of the same shape, dtype, device, strides and misalignment."""
    offset = misalignment(tensor) // tensor.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in _dims(tensor)) if tensor.numel() else 0
    storage = torch.empty(offset + extent, dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, tensor.stride(), offset)


def distinct_part(tensor: Tensor) -> Tensor:
    """The view that holds every element once: expanded dimensions are cut to size 1."""
    for dim, (size, stride) in enumerate(_dims(tensor)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def clone_layout(tensor: Tensor) -> Tensor:
    """A copy with the same strides and misalignment."""
    copy = empty_like_layout(tensor)
    distinct_part(copy).copy_(distinct_part(tensor))
    return copy


class StaticInputs:
    """The fixed buffers that a graph reads, one per distinct tensor argument."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Ordinary tensors even in inference mode: their version counter shows writes.
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = [empty_like_layout(tensor) for tensor in tensors]
            self._targets = [distinct_part(buffer) for buffer in self.buffers]
        self._expanded = [t is not b for t, b in zip(self._targets, self.buffers, strict=True)]
        self._groups = _by_dtype(self._targets)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy the caller's tensors in, one launch per dtype. No synchronisation."""
        sources = [distinct_part(t) if e else t for t, e in zip(tensors, self._expanded, strict=True)]
        for targets, indices in self._groups:
            if len(indices) == 1:
                targets[0].copy_(sources[indices[0]])
            else:
                torch._foreach_copy_(targets, [sources[i] for i in indices])

    def versions(self) -> list[int]:
        """Grow when something writes into a buffer."""
        return [buffer._version for buffer in self.buffers]


def _by_dtype(targets: Sequence[Tensor]) -> list[tuple[list[Tensor], list[int]]]:
    groups: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, target in enumerate(targets):
        groups[target.dtype].append(index)
    return [([targets[i] for i in indices], indices) for indices in groups.values()]


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))
