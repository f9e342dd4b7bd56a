"""Noise levels and the Euler step against the scheduler of diffusers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from accel.fusion import guided_euler_step
from pipelines.flux2.schedule import flow_match_schedule

OPTIONS = [
    {"use_dynamic_shifting": True, "shift": 3.0},
    {"use_dynamic_shifting": True, "time_shift_type": "linear", "shift_terminal": 0.02},
    {"shift": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("steps", "tokens"), [(2, 256), (4, 4096), (50, 8192)])
def test_a_whole_schedule_steps_like_the_scheduler(
    options: dict[str, Any], dtype: torch.dtype, steps: int, tokens: int
) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(**options)
    ours = FlowMatchEulerDiscreteScheduler(**options)
    theirs.set_timesteps(
        steps, sigmas=np.linspace(1.0, 1 / steps, steps), mu=compute_empirical_mu(tokens, steps)
    )
    before = ours.timesteps.clone()
    schedule = flow_match_schedule(ours, steps=steps, image_tokens=tokens)
    assert torch.equal(ours.timesteps, before)
    assert torch.equal(schedule.timesteps, theirs.timesteps)

    generator = torch.Generator().manual_seed(1)
    latents = expected = torch.randn(1, 5, 4, generator=generator).to(dtype)
    for timestep, width in zip(theirs.timesteps, schedule.widths, strict=True):
        velocity = torch.randn(1, 5, 4, generator=generator).to(dtype)
        expected = theirs.step(velocity, timestep, expected, return_dict=False)[0]
        latents = guided_euler_step(latents, velocity, None, guidance=1.0, delta=width)
        assert latents.dtype == dtype
        assert torch.equal(latents, expected)


def test_the_width_is_rounded_to_the_dtype_of_the_velocity() -> None:
    """As a 0-dim tensor on the device it takes part in type promotion as a number's dtype does not."""
    width, velocity = torch.tensor(-0.0731), torch.tensor([[[3.0]]], dtype=torch.bfloat16)
    rounded = (width.bfloat16().float() * 3.0).bfloat16().float()
    step = guided_euler_step(torch.zeros(1, 1, 1), velocity, None, guidance=1.0, delta=width)
    assert step.float().item() == rounded.item()
