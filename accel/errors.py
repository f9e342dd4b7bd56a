"""Errors meant for the person at the keyboard.

Every message says what was wrong, where, and what to do next. The entry point prints them
without a traceback; anything that is not a `SamebitError` is a fault of the program.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self


class SamebitError(Exception):
    """Base of all errors that a user can mend. exit_code: of a command that it ends."""

    exit_code: ClassVar[int] = 2


class ConfigError(SamebitError):
    """A key, option or value of the configuration is wrong."""


class CheckpointError(SamebitError):
    """Weights or a policy package are missing, damaged or do not fit the model."""


class ObservationError(SamebitError, ValueError):
    """A camera image, robot state, prompt or request parameter can't be used."""


class OutputError(SamebitError):
    """A result could not be written. Nothing that existed before was damaged."""


class DeviceMemoryError(SamebitError):
    """The model does not fit the device. Raised before anything is allocated."""


class StrictModeError(SamebitError):
    """`accel.strict=true` and something planned as accelerated ran eager."""

    exit_code = 3

    @classmethod
    def listing(cls, violations: Iterable[str]) -> Self:
        """violations: what ran eager and why, one line each; see `accel.runner.Runner.strict_violations`."""
        return cls(
            "accel.strict=true and not everything planned was accelerated:\n  " + "\n  ".join(violations)
        )


class UnequalBitsError(SamebitError):
    """Requests with the same inputs gave different bits: the promise is broken."""

    exit_code = 1
