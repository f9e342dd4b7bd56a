"""Digests of results, by which runs are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from accel.graphs.tree import distinct_tensors
from pipelines.transfer import read_back


def tensor_digest(value: Any) -> str:
    """SHA-256 of shapes, dtypes and raw bytes of the tensors in a value, in order."""
    sha = hashlib.sha256()
    for leaf in distinct_tensors(value):
        sha.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
        values = read_back(leaf.detach()).contiguous()
        sha.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


class DigestedOutputs:
    """A result that keeps every stage output by "stage.field"; shared, not to be written to."""

    outputs: Mapping[str, Any]

    @cached_property
    def digests(self) -> dict[str, str]:
        """`tensor_digest` of every stage output, computed on first use."""
        return {name: tensor_digest(value) for name, value in self.outputs.items()}
