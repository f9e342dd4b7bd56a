"""What a verified decision depends on, and what it does not.

A layout is everything about the arguments but their values: the fast key of the hot path. Many layouts
share one signature, which is what gets verified.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Below this many rows ATen's reductions may split work another way (fusion spec section 3.3).
_REDUCTION_ROWS = 16
_PLAIN = (Tensor, torch.nn.Parameter)


def layout_of(args: Sequence[Any]) -> Hashable:
    """Exact shapes, strides, dtypes, device and alignment of a call. Never waits for the device.

    Numbers count with the sign of zero, which equality does not see: a plan has them built in.
    """
    return tuple([_layout(arg) if isinstance(arg, Tensor) else arg or repr(arg) for arg in args])


def _layout(tensor: Tensor) -> Hashable:
    if type(tensor) not in _PLAIN:
        return type(tensor)  # refused as a whole; a fake tensor has no address to look at
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.data_ptr() % 16


def signature_of(args: Sequence[Any]) -> Hashable:
    """Class of calls that a verification covers. Never waits for the device.

    Widths, strides and alignment count; batch size and sequence length count only as one or many,
    since they merely size the grid.
    """
    return tuple(_tensor_class(arg) if isinstance(arg, Tensor) else arg for arg in args)


def _tensor_class(tensor: Tensor) -> Hashable:
    shape = tensor.shape
    strides = [0 if size == 1 else stride for size, stride in zip(shape, tensor.stride(), strict=True)]
    width = shape[-1] if shape else 1
    # Trailing dimensions that the model sets: (heads, d), the width, or none of a list of indices.
    fixed = 0 if not tensor.is_floating_point() else 2 if len(shape) >= 4 else 1
    batch = 1 if len(shape) >= 3 else 0  # its stride grows with the sequence, all others are set by the model
    return (
        tensor.dtype,
        _device_class(tensor.device),
        tensor.data_ptr() % 16 == 0,
        tensor.numel() >= _REDUCTION_ROWS * width,
        shape[len(shape) - fixed :],
        *[size == 1 for size in shape[: len(shape) - fixed]],
        *strides[batch:],
        *[_batch_stride_class(stride) for stride in strides[:batch]],
    )


def _batch_stride_class(stride: int) -> Hashable:
    """What Triton specialises an integer argument on."""
    return stride in (0, 1), stride % 16 == 0, stride >= 2**31


@cache
def _device_class(device: torch.device) -> Hashable:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return device, capability
