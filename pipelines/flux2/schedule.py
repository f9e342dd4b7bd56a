"""The noise levels of FLUX.2 and its Euler step, as diffusers computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """fp32 on the CPU. timesteps: (n,), in 1000ths, as the scheduler gives them to the network.

    widths: (n,), next noise level minus this one, at most 0.
    """

    timesteps: Tensor
    widths: Tensor


def flow_match_schedule(scheduler: Any, *, steps: int, image_tokens: int) -> Schedule:
    """Noise levels of `FlowMatchEulerDiscreteScheduler` for an image of that many tokens.

    scheduler: its configuration is read; the object itself is not changed.
    """
    fresh = type(scheduler).from_config(scheduler.config)
    fresh.set_timesteps(
        sigmas=np.linspace(1.0, 1 / steps, steps),
        mu=compute_empirical_mu(image_tokens, steps),
        device="cpu",
    )
    return Schedule(fresh.timesteps, fresh.sigmas.diff())
