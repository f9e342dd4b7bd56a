"""Between dataset units and what the denoiser sees: state in, actions out (spec sections 5 and 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.errors import SamebitError
from pipelines.flux3_action.policy_config import PolicyConfig, QuantileStats

MIN_SPAN = 1e-6
"""Channels whose quantiles are closer than this are constant: their span counts as 1."""


class ActionError(SamebitError):
    """The denoised actions can't be sent to a robot."""


def state_token(state: Tensor, config: PolicyConfig) -> Tensor:
    """(A,) state in dataset units -> (1, 1, A) float32 token."""
    token = flip_gripper(state.float(), config.gripper_flip_dims)
    if config.state_normalization is not None:
        token = normalise(token, config.state_normalization, clip=config.normalization_clip)
    return (token * config.action_scale).view(1, 1, -1)


def actions_from_targets(targets: Tensor, state: Tensor, config: PolicyConfig) -> Tensor:
    """(K, A) final sample and (A,) observed state -> (K, A) float32 actions in dataset units, on the CPU.

    state: dataset units, the anchor of `joint_delta` actions.
    Raises: ActionError if a result is NaN or infinite.
    """
    actions = targets.to("cpu", torch.float32) / config.action_scale
    if config.action_normalization is not None:
        actions = denormalise(actions, config.action_normalization)
    if config.action_parameterization == "joint_delta":
        anchor = flip_gripper(state.float(), config.gripper_flip_dims)
        kept = list(config.absolute_action_dims)
        integrated = anchor + actions.cumsum(dim=0)
        integrated[:, kept] = actions[:, kept]
        actions = integrated
    actions = flip_gripper(actions, config.gripper_flip_dims)
    _require_finite(actions)
    return actions


def flip_gripper(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """`1 - x` in channels `dims` of (..., A); its own inverse."""
    flipped = x.clone()
    flipped[..., list(dims)] = 1 - x[..., list(dims)]
    return flipped


def normalise(x: Tensor, stats: QuantileStats, *, clip: float) -> Tensor:
    """Map [q01, q99] of each channel of (..., A) to [-1, 1], then bound to +-clip."""
    low, span = _low_and_span(stats)
    return (2 * (x - low) / span - 1).clamp(-clip, clip)


def denormalise(x: Tensor, stats: QuantileStats) -> Tensor:
    """Map [-1, 1] to [q01, q99] of each channel of (..., A); not clipped."""
    low, span = _low_and_span(stats)
    return (x + 1) * span / 2 + low


def _low_and_span(stats: QuantileStats) -> tuple[Tensor, Tensor]:
    low = torch.tensor(stats.q01, dtype=torch.float32, device="cpu")
    span = torch.tensor(stats.q99, dtype=torch.float32, device="cpu") - low
    return low, torch.where(span > MIN_SPAN, span, 1.0)


def _require_finite(actions: Tensor) -> None:
    bad = (~actions.isfinite()).nonzero()
    if len(bad):
        step, channel = bad[0].tolist()
        raise ActionError(
            f"{len(bad)} of {actions.numel()} actions are not finite, first at step {step}, "
            f"channel {channel}; check the weights and the dtype (bfloat16 or float32)"
        )
