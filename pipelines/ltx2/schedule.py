"""The noise levels of a request, and what the transformer makes of each before the loop begins."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipelines.ltx2.transformer_pass import (
    Embedding,
    Modulation,
    Transformer,
    embed_timestep,
    embed_video_timestep,
)


@dataclass(frozen=True)
class NoiseLevel:
    """One noise level as one kind of pass sees it; R rows.

    timestep: fp32 (R,), 0..1000. video: modulation of the video tokens; `None` where they have noise levels
    of their own, as with a given first frame.
    """

    timestep: Tensor
    modulation: Modulation
    video: Embedding | None


@dataclass(frozen=True)
class DenoisingStep:
    """The inputs of one denoising step.

    sigma: fp32 scalar, noise level before the step. delta: fp32 scalar, what the step adds to it, < 0.
    batch: for the pass with all rows. positive: for passes with the rows of the prompt alone.
    """

    sigma: Tensor
    delta: Tensor
    batch: NoiseLevel
    positive: NoiseLevel


def denoising_steps(
    transformer: Transformer,
    scheduler: Any,
    *,
    sigmas: Sequence[float],
    tokens: int,
    rows: int,
    videos: int,
    per_token: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[DenoisingStep, ...]:
    """One a noise level. Each timestep is embedded alone: batching them could change bits.

    scheduler: diffusers' `FlowMatchEulerDiscreteScheduler`; it is not changed. sigmas: from high to low,
    before its shift. tokens: of the video, which the shift depends on. rows, videos: of the two kinds of
    passes. per_token: leave the video's modulation to the pass. dtype: the model's.
    """
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(sigmas=list(sigmas), device=device, mu=_shift(scheduler.config, tokens))

    def level(timestep: Tensor, rows: int) -> NoiseLevel:
        timesteps = timestep.expand(rows).clone()
        video = None if per_token else embed_video_timestep(transformer, timesteps, dtype=dtype)
        return NoiseLevel(timesteps, embed_timestep(transformer, timesteps, dtype=dtype), video)

    steps = []
    for index, timestep in enumerate(scheduler.timesteps):
        sigma, following = scheduler.sigmas[index], scheduler.sigmas[index + 1]
        batch = level(timestep, rows)
        positive = batch if rows == videos else level(timestep, videos)
        steps.append(DenoisingStep(sigma.clone(), following - sigma, batch, positive))
    return tuple(steps)


def moves(scheduler: Any, sigmas: Sequence[float]) -> bool:
    """Whether the scheduler changes these noise levels, for some number of tokens."""
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(sigmas=list(sigmas), mu=2.0)  # of no kind of time shift the neutral one
    return not torch.equal(scheduler.sigmas[:-1], torch.tensor(sigmas, dtype=torch.float32))


def unshifted(scheduler: Any) -> Any:
    """A scheduler of the same class and config that takes noise levels as they are."""
    return type(scheduler).from_config(scheduler.config, use_dynamic_shifting=False, shift_terminal=None)


def _shift(config: Any, tokens: int) -> float:
    """Time shift, linear in the number of video tokens (LTX-2's defaults where the config is silent)."""
    low, high = config.get("base_image_seq_len", 1024), config.get("max_image_seq_len", 4096)
    shift_low, shift_high = config.get("base_shift", 0.95), config.get("max_shift", 2.05)
    slope = (shift_high - shift_low) / (high - low)
    offset = shift_low - slope * low
    return float(tokens * slope + offset)
