"""What one FLUX 3 Action request asks for, and what it returns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelines.flux3_action.observation import Observation
from pipelines.flux3_action.policy_config import Sampler
from stages.guidance import passes


@dataclass(frozen=True, kw_only=True)
class ActionRequest:
    """One observation and how to sample its chunk of actions.

    seed: non-negative, seeds the CPU noise generator. steps: network evaluations, >= 1.
    shift: sampler shift, > 0. guidance_video, guidance_action: scales >= 0; with both exactly
    1.0 one conditional pass per step is run, else two. horizon: actions returned, 1..K.
    """

    observation: Observation
    seed: int
    steps: int
    sampler: Sampler
    shift: float
    guidance_video: float
    guidance_action: float
    horizon: int

    @property
    def guided(self) -> bool:
        """Whether a step runs a second pass with the empty caption."""
        return passes(self.guidance_video, self.guidance_action) == 2


@dataclass(frozen=True)
class ActionResult:
    """A chunk of actions and what it was made from.

    actions: float32 (K, A), dataset units (DROID: rad; gripper closed fraction 0..1).
    state: float32 (A,), the observed state in the same units. canvas: float32 (3, H, W) in [-1, 1].
    fps: control rate in Hz. outputs: every stage output by "stage.field"; shared, do not write.
    """

    actions: npt.NDArray[np.float32]
    state: npt.NDArray[np.float32]
    canvas: npt.NDArray[np.float32]
    fps: float
    prompt: str
    seed: int
    outputs: Mapping[str, Any]

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of shape, dtype and raw bytes of every stage output, computed on first use."""
        return {name: _digest(value) for name, value in self.outputs.items()}


def _digest(value: Any) -> str:
    sha = hashlib.sha256()
    for leaf in _tensors(value):
        sha.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
        sha.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
