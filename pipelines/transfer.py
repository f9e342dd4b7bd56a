"""Values between host and device: what a request brings, and what it gives."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_BYTES = 8 * 2**20


def upload(values: Tensor, device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of `values` on `device`; the host does not wait for it.

    values: on the CPU, any shape and strides. dtype: of the copy, by default theirs; the cast happens on the
    CPU, so that its bits do not depend on the device.

    Copied from ordinary memory, the host would wait for all work that the device still has before the copy,
    and then the device for the host. Torch does not give the pinned memory away before the copy is done.
    """
    staged = torch.empty_like(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return staged.copy_(values).to(device, non_blocking=True)


def read_back(values: Tensor) -> Tensor:
    """`values` on the CPU, in ordinary memory; waits for the device. What is there already is not copied.

    Large values pass through one pinned buffer: copied at once into memory that nobody has touched yet, the
    driver finds its pages one by one, on one thread. A clip of 121 frames takes a tenth of the time so.
    """
    if values.device.type != "cuda" or values.nbytes <= _CHUNK_BYTES:
        return values.cpu()
    result = torch.empty_like(values, device="cpu")
    if result.stride() != values.stride():  # values with gaps between them, or that share memory
        return read_back(values.contiguous())
    buffer = torch.empty(
        _CHUNK_BYTES // values.element_size(), dtype=values.dtype, device="cpu", pin_memory=True
    )
    sources, targets = (torch.split(_in_memory_order(each), len(buffer)) for each in (values, result))
    for source, target in zip(sources, targets, strict=True):
        target.copy_(buffer[: len(source)].copy_(source))
    return result


def _in_memory_order(dense: Tensor) -> Tensor:
    """All elements of a tensor without gaps, as one dimension."""
    return dense.as_strided((dense.numel(),), (1,))
