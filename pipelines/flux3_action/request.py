"""What one FLUX 3 Action request asks for, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.flux3_action.observation import Observation
from pipelines.flux3_action.policy_config import Sampler
from pipelines.number_types import MAX_STEPS
from pipelines.request_rules import MAX_SEED, number, require_rules, whole
from pipelines.tensor_digest import DigestedOutputs
from stages.guidance import passes
from stages.samplers import sampler_plan


@dataclass(frozen=True, kw_only=True)
class ActionRequest:
    """One observation and how to sample its chunk of actions.

    seed: 0..`MAX_SEED`, seeds the CPU noise generator. steps: network evaluations, >= 1.
    shift: sampler shift, > 0. guidance_video, guidance_action: scales >= 0; with both exactly
    1.0 one conditional pass per step is run, else two. horizon: actions returned, 1..K.
    Raises: ConfigError for a value of another type or range, or a sampler that can't run
    these steps with this shift.
    """

    observation: Observation
    seed: int
    steps: int
    sampler: Sampler
    shift: float
    guidance_video: float
    guidance_action: float
    horizon: int

    def __post_init__(self) -> None:
        rules = {
            "seed": whole(self.seed, 0, MAX_SEED),
            "steps": whole(self.steps, 1, MAX_STEPS),
            "shift": (number(self.shift, 0)[0] and self.shift > 0, "a number > 0"),
            "guidance_video": number(self.guidance_video, 0),
            "guidance_action": number(self.guidance_action, 0),
            "horizon": whole(self.horizon, 1),
        }
        require_rules(self, rules)
        sampler_plan(self.sampler, steps=self.steps, shift=self.shift)

    @property
    def guided(self) -> bool:
        """Whether a step runs a second pass with the empty caption."""
        return passes(self.guidance_video, self.guidance_action) == 2


@dataclass(frozen=True)
class ActionResult(DigestedOutputs):
    """A chunk of actions and what it was made from.

    actions: float32 (K, A), dataset units (DROID: rad; gripper closed fraction 0..1).
    state: float32 (A,), the observed state in the same units. canvas: float32 (3, H, W) in [-1, 1];
    a pipeline's is read-only and shares memory with `outputs`. fps: control rate in Hz.
    outputs: every stage output by "stage.field"; shared, do not write.
    notes: what the sender should know about how the request was served.
    """

    actions: npt.NDArray[np.float32]
    state: npt.NDArray[np.float32]
    canvas: npt.NDArray[np.float32]
    fps: float
    prompt: str
    seed: int
    outputs: Mapping[str, Any]
    notes: tuple[str, ...] = ()
