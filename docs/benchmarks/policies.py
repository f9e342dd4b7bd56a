"""The policies that benchmarks compare, by the names of their arms."""

from __future__ import annotations

from accel.policy import AccelPolicy
from tasks.config import compose


def policy_of(arm: str, *model: str) -> AccelPolicy:
    """Of an arm such as "graph+fused", or "graph+fused, batched_guidance" with savings by name.

    model: overrides that choose the model, which must have the savings.
    """
    name, *savings = arm.split(", ")
    return compose(*model, f"accel={name}", *(f"accel.fused.{saving}=true" for saving in savings)).accel
