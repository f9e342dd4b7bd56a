"""The policies that benchmarks compare, by the names of their arms."""

from __future__ import annotations

from accel.policy import AccelPolicy
from tasks.arms import policy_named


def policy_of(arm: str, *model: str) -> AccelPolicy:
    """Of an arm such as "graph+fused", or "graph+fused, batched_guidance" with savings by name.

    model: overrides that choose the model, which must have the savings.
    """
    name, *savings = arm.split(", ")
    return policy_named(name, *model, *(f"accel.fused.{saving}=true" for saving in savings))
