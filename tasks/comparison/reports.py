"""The files of tasks, read as findings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from accel.errors import OutputError
from tasks.comparison.findings import REQUEST, Findings, OwnReference
from tasks.result_file import RunResult, read_result
from tasks.sweep import REPORT_FILES


def read_findings(folder: Path, task: str) -> Findings | None:
    """`None` where there is no file that can be read."""
    file = folder / REPORT_FILES[task]
    kind, findings_of = _READERS[task]
    try:
        report = read_result(file) if kind is RunResult else msgspec.json.decode(file.read_bytes(), type=kind)
    except (OutputError, OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    found: Findings = findings_of(report)
    return found


@dataclass(frozen=True, kw_only=True)
class _Report:
    config: dict[str, Any]
    environment: dict[str, dict[str, Any]]
    choices: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.environment["device"]["name"])


@dataclass(frozen=True, kw_only=True)
class _BenchReport(_Report):
    against: str
    unequal_outputs: list[str] | None
    relative_errors: dict[str, float | None]
    speed_up: dict[str, float | None]
    arms: dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class _Difference:
    stage: str
    field: str


@dataclass(frozen=True, kw_only=True)
class _Visit:
    difference: _Difference | None


@dataclass(frozen=True, kw_only=True)
class _VerifyReport(_Report):
    accelerated: bool
    requests: list[dict[str, Any]]
    comparisons: list[_Visit]
    stages: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _ProfileReport(_Report):
    cold_ms: float | None
    walls_ms: list[float]
    stages: list[dict[str, Any]]
    record: list[dict[str, Any]]


def _of_run(result: RunResult) -> Findings:
    return Findings(
        config=result.config,
        device=result.environment["device"]["name"],
        stages=result.stages,
        cold_ms=result.request["cold_ms"],
        walls_ms=result.request["walls_ms"],
        digests=result.digests,
        choices=result.choices,
    )


def _of_bench(report: _BenchReport) -> Findings:
    """The accelerated arm beside the other one."""
    *_, accelerated = report.arms.values()
    *stages, total = accelerated
    unequal = report.unequal_outputs
    return Findings(
        config=report.config,
        device=report.device,
        stages=stages,
        cold_ms=total["cold_ms"],
        walls_ms=total["walls_ms"],
        choices=report.choices,
        remarks=(f"beside {report.against} in its own process",),
        reference=OwnReference(
            policy=report.against,
            unequal=tuple(unequal or ()),
            equal={} if unequal is None else _equal_outputs(unequal, [stage["name"] for stage in stages]),
            speed_ups=report.speed_up | {REQUEST: report.speed_up.get(total["name"])},
            errors=_largest_errors(report.relative_errors),
        ),
    )


def _equal_outputs(unequal: Sequence[str], stages: Sequence[str]) -> dict[str, bool | None]:
    differing = {name.partition(".")[0] for name in unequal}
    return {REQUEST: not differing, **{stage: stage not in differing for stage in stages}}


def _largest_errors(by_output: Mapping[str, float | None]) -> dict[str, float]:
    """By stage and for `REQUEST`; none where that of one output is unknown."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for name, error in by_output.items():
        for place in (name.partition(".")[0], REQUEST):
            errors[place].append(math.inf if error is None else error)
    return {place: max(found) for place, found in errors.items() if math.isfinite(max(found))}


def _of_verify(report: _VerifyReport) -> Findings:
    """Bits alone: its requests are unlike and take turns with eager ones, so that times say little."""
    differences = [visit.difference for visit in report.comparisons if visit.difference]
    names = [stage["name"] for stage in report.stages]
    compared = f"{len(report.requests)} requests, {len(report.comparisons)} comparisons with eager"
    nothing = () if report.accelerated else ("nothing was accelerated, so that this proves nothing",)
    return Findings(
        config=report.config,
        device=report.device,
        stages=[stage | {"cold_ms": None, "walls_ms": []} for stage in report.stages],
        choices=report.choices,
        remarks=(compared, *nothing),
        reference=OwnReference(
            policy="eager",
            unequal=tuple(dict.fromkeys(f"{found.stage}.{found.field}" for found in differences)),
            equal={REQUEST: not differences if report.comparisons else None}
            | {name: _equal_in_all(name, names, differences) for name in names},
        ),
    )


def _equal_in_all(stage: str, order: Sequence[str], differences: Sequence[_Difference]) -> bool | None:
    """Of a comparison only the first difference is known: what came after it is not."""
    firsts = {found.stage for found in differences}
    if stage in firsts:
        return False
    return None if firsts.intersection(order[: order.index(stage)]) else True


def _of_profile(report: _ProfileReport) -> Findings:
    """Launches and busy time are those of the profiled request, where it ran on a GPU."""
    profiled = {stage["name"]: stage for stage in report.stages if stage["idle_ms"] is not None}
    stages = [
        row
        if (stage := profiled.get(row["name"])) is None
        else row
        | {
            "gpu_busy_ms": stage["busy_ms"],
            "launches": sum(kernel["calls"] for kernel in stage["kernels"]),
        }
        for row in report.record
    ]
    return Findings(
        config=report.config,
        device=report.device,
        stages=stages,
        cold_ms=report.cold_ms,
        walls_ms=report.walls_ms,
        choices=report.choices,
    )


# By task: the form of its file, and what that says.
_READERS: Mapping[str, tuple[Any, Any]] = {
    "run": (RunResult, _of_run),
    "bench": (_BenchReport, _of_bench),
    "verify": (_VerifyReport, _of_verify),
    "profile": (_ProfileReport, _of_profile),
}
