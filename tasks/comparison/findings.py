"""What a job found, in one form for all tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

REQUEST = "request"

# As `StageRecord.to_dict()` has it, with what else a task knows of a stage.
StageRow: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class OwnReference:
    """What a job compared itself with, in its own process.

    policy: its name. unequal: outputs with other bits than there, by "stage.field".
    equal, speed_ups, errors: by stage and for `REQUEST`; `None`, or no entry, where nothing is known.
    errors: the largest relative error of an output that differs.
    """

    policy: str
    unequal: tuple[str, ...]
    equal: Mapping[str, bool | None]
    speed_ups: Mapping[str, float | None] = field(default_factory=dict)
    errors: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one job found.

    config: resolved. device: its name. cold_ms, walls_ms: of the first request and of those after it.
    digests: SHA-256 of outputs by "stage.field"; empty where the task keeps none.
    choices: what `accel=auto` chose, by stage. remarks: what else a reader must know.
    reference: `None` for tasks that compare with nothing themselves.
    """

    config: Mapping[str, Any]
    device: str
    stages: Sequence[StageRow]
    cold_ms: float | None = None
    walls_ms: Sequence[float] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    reference: OwnReference | None = None
