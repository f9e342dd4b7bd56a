"""What a request of any model requires of its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from accel.errors import ConfigError

MAX_SEED = 2**63 - 1

Rule: TypeAlias = tuple[bool, str]
"""Whether it holds, and what is legal, in words."""


def whole(value: object, low: int, high: float = math.inf) -> Rule:
    """A whole number in `low`..`high`; truth values are none."""
    holds = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    return holds, f"a whole number >= {low}" if high == math.inf else f"a whole number, {low} to {high}"


def number(value: object, low: float, high: float = math.inf) -> Rule:
    """A finite number in `low`..`high`; truth values are none."""
    holds = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
    )
    return holds, f"a number >= {low:g}" if high == math.inf else f"a number, {low:g} to {high:g}"


def require_rules(request: object, rules: Mapping[str, Rule]) -> None:
    """rules: by field of the request. Raises: ConfigError for the first one that does not hold."""
    for field, (holds, legal) in rules.items():
        if not holds:
            raise ConfigError(f"{field}={getattr(request, field)} is out of range; use {legal}.")
