"""Proof that a fresh graph gives the bits of eager: on the inputs it was captured with and on others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.fusion.compare import first_mismatch
from accel.graphs.buffers import distinct_part
from accel.graphs.tree import Key, TensorKey, flatten, leaf_names, tensor_names


def second_inputs(tensors: list[Tensor]) -> list[Tensor]:
    """Other values of the same kind: floating tensors reversed and shrunk, the rest unchanged.

    Shrunk, so that values used as coordinates stay in range; integers and masks may be indices.
    """
    return [_altered(distinct_part(tensor)).expand(tensor.shape) for tensor in tensors]


def difference(eager: Any, replayed: Any, *, device: torch.device) -> str:
    """Where two results differ, down to the bit; empty if nowhere. NaN equals NaN, -0.0 differs from 0.0.

    Waits for the device.
    """
    eager_key, eager_tensors = flatten(eager, device=device)
    replayed_key, replayed_tensors = flatten(replayed, device=device)
    if _form(eager_key) != _form(replayed_key):
        return "output: structure, shape, dtype or a constant differs between eager and replay"
    names = tensor_names(eager_key)
    for name, expected, actual in zip(names, eager_tensors, replayed_tensors, strict=True):
        mismatch = first_mismatch(expected, actual, what=f"output{name}")
        if mismatch is not None:
            return str(mismatch)
    return ""


def _altered(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_complex or (tensor.is_floating_point() and tensor.element_size() > 1):
        return tensor.flip(tuple(range(tensor.dim()))) * 0.75
    if tensor.is_floating_point():  # 8-bit floats know no arithmetic
        return tensor.view(torch.uint8).flip(tuple(range(tensor.dim()))).view(tensor.dtype)
    return tensor


def _form(key: Key) -> list[tuple[str, Any]]:
    """Names, containers, constants, shapes and dtypes; layout is left to the comparison of tensors."""
    return [
        (name, (leaf.alias, leaf.dtype, leaf.shape) if isinstance(leaf, TensorKey) else leaf)
        for name, leaf in leaf_names(key)
    ]
