"""Values that the host makes for a request, on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of `values` on `device`; the host does not wait for it.

    values: on the CPU, any shape and strides. dtype: of the copy, by default theirs; the cast happens on the
    CPU, so that its bits do not depend on the device.

    Copied from ordinary memory, the host would wait for all work that the device still has before the copy,
    and then the device for the host. Torch does not give the pinned memory away before the copy is done.
    """
    staged = torch.empty_like(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return staged.copy_(values).to(device, non_blocking=True)
