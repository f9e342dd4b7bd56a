"""State tokens and actions against recorded tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipelines.flux3_action.action_space import (
    ActionError,
    actions_from_targets,
    denormalise,
    flip_gripper,
    normalise,
    state_token,
)
from pipelines.flux3_action.policy_config import QuantileStats
from pipelines.flux3_action.synthetic import droid_config

DROID = droid_config("full")


def quantiles(stats) -> QuantileStats | None:
    return stats and QuantileStats(q01=tuple(stats["q01"]), q99=tuple(stats["q99"]))


def test_normalization(golden, golden_case):
    case = golden_case("normalization")
    tensors = golden(case["file"])
    stats, x, tol = quantiles(case["config"]["stats"]), tensors["norm.x"], case["tol"]
    torch.testing.assert_close(normalise(x, stats, clip=6.0), tensors["norm.normalized_clip6"], **tol)
    torch.testing.assert_close(normalise(x, stats, clip=1.5), tensors["norm.normalized_clip1p5"], **tol)
    torch.testing.assert_close(denormalise(x, stats), tensors["norm.denormalized"], **tol)


@pytest.mark.parametrize(
    "name",
    [
        "absolute_plain",
        "absolute_gripper",
        "absolute_norm_gripper",
        "delta",
        "delta_gripper_abs_norm",
        "delta_two_abs",
    ],
)
def test_targets_to_actions(golden, golden_case, name):
    case = golden_case(f"targets_to_actions_{name}")
    tensors = golden(case["file"])
    config = replace(
        DROID,
        action_scale=2.0,
        action_parameterization=case["config"]["action_parameterization"],
        gripper_flip_dims=tuple(case["config"]["gripper_flip_dims"]),
        absolute_action_dims=tuple(case["config"]["absolute_action_dims"]),
        action_normalization=quantiles(case["config"]["action_normalization"]),
    )
    targets = tensors["targets"] * config.action_scale  # the record starts after the division
    actions = actions_from_targets(targets, tensors["state"], config)
    torch.testing.assert_close(actions, tensors[case["outputs"]["actions"]], **case["tol"])


def test_state_token(golden, golden_case):
    case = golden_case("state_token")
    tensors = golden(case["file"])
    config = replace(
        DROID,
        state_normalization=quantiles(case["config"]["state_normalization"]),
        normalization_clip=case["config"]["normalization_clip"],
    )
    token = state_token(tensors["state_token.in"], config)
    torch.testing.assert_close(token, tensors["state_token.out"], **case["tol"])


def test_state_without_statistics_is_not_clipped():
    state = torch.tensor([100.0, -100.0, 0, 0, 0, 0, 0, 0.25])
    token = state_token(state, DROID)
    assert token.tolist() == [[[200.0, -200.0, 0, 0, 0, 0, 0, 1.5]]]


def test_inputs_stay_untouched():
    state, targets = torch.rand(8), torch.rand(32, 8)
    copies = state.clone(), targets.clone()
    state_token(state, DROID)
    actions_from_targets(targets, state, DROID)
    assert torch.equal(state, copies[0])
    assert torch.equal(targets, copies[1])


def test_flip_is_its_own_inverse():
    x = torch.tensor([[0.25, 0.5], [1.0, 0.0]])
    assert torch.equal(flip_gripper(flip_gripper(x, (-1, 0)), (-1, 0)), x)


def test_actions_are_float32_whatever_the_model_computes_in():
    actions = actions_from_targets(torch.ones(32, 8, dtype=torch.bfloat16), torch.zeros(8), DROID)
    assert actions.dtype == torch.float32
    assert actions.shape == (32, 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_actions_that_are_not_finite_are_refused(value):
    targets = torch.zeros(32, 8)
    targets[3, 7] = value
    with pytest.raises(ActionError, match="step 3, channel 7"):
        actions_from_targets(targets, torch.zeros(8), DROID)
