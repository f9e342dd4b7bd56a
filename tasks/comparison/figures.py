"""What was measured of one stage of one job, beside the same stage of its eager job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from accel.record import Reason
from tasks.result_file import RunResult

REQUEST = "request"


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """Calls that ran eager, or a fusion site that ran its reference, although nobody switched it off."""

    kind: str  # "eager" or "reference"
    site: str  # of fusion sites alone
    reason: str
    detail: str
    calls: int

    @property
    def text(self) -> str:
        """For example "reference (mismatch): swiglu"."""
        return f"{self.kind} ({self.reason})" + (f": {self.site}" if self.site else "")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One stage, or all of a request under the name `REQUEST`. `None`: not measured.

    p50_ms, p95_ms: of the requests after the first; cold_ms: of the first, captures and proofs included.
    speed_up: p50 of the eager job over this p50.
    gpu_busy: 0..1, the share of the p50 in which the GPU computed.
    launches: kernels, copies and fills on the GPU; host_launches: calls by which the host started them.
    extra_bytes: device memory held by graphs and their buffers.
    equal: whether all digests equal those of the eager job; `None` without one.
    """

    stage: str
    tier: str
    p50_ms: float | None = None
    p95_ms: float | None = None
    cold_ms: float | None = None
    speed_up: float | None = None
    gpu_busy: float | None = None
    launches: int | None = None
    host_launches: int | None = None
    extra_bytes: int = 0
    equal: bool | None = None
    fallbacks: tuple[Fallback, ...] = ()


def figures_of(result: RunResult, eager: RunResult | None) -> tuple[Figures, ...]:
    """Of whole requests first, then of each stage in the order of the pipeline."""
    figures = _measured(result)
    if eager is None:
        return figures
    base = {figure.stage: figure for figure in _measured(eager)}
    return tuple(
        replace(
            figure,
            speed_up=_ratio(base[figure.stage].p50_ms, figure.p50_ms) if figure.stage in base else None,
            equal=_same_bits(_digests(result, figure.stage), _digests(eager, figure.stage)),
        )
        for figure in figures
    )


def _measured(result: RunResult) -> tuple[Figures, ...]:
    rows = result.stages
    total = result.request | {
        "name": REQUEST,
        "tier": ", ".join(sorted({row["tier"] for row in rows} or {result.request["tier"]})),
        "extra_bytes": sum(row["extra_bytes"] for row in rows),
        **{key: _sum(rows, key) for key in ("launches", "host_launches", "gpu_busy_ms")},
        **{key: [each for row in rows for each in row[key]] for key in ("outcomes", "sites")},
    }
    return tuple(_figures(row) for row in (total, *rows))


def _figures(row: Mapping[str, Any]) -> Figures:
    walls = row["walls_ms"]
    p50 = median(walls) if walls else None
    return Figures(
        stage=row["name"],
        tier=row["tier"],
        p50_ms=p50,
        p95_ms=quantiles(walls, n=20, method="inclusive")[-1] if len(walls) > 1 else p50,
        cold_ms=row["cold_ms"],
        gpu_busy=_ratio(row["gpu_busy_ms"], p50),
        launches=row["launches"],
        host_launches=row["host_launches"],
        extra_bytes=row["extra_bytes"],
        fallbacks=_fallbacks(row),
    )


def _fallbacks(row: Mapping[str, Any]) -> tuple[Fallback, ...]:
    """Like ones added up, most calls first."""
    calls: dict[tuple[str, str, str, str], int] = {}
    for each in (*row["outcomes"], *row["sites"]):
        if each["reason"] not in (None, Reason.DISABLED):
            key = (each.get("kind", "reference"), each.get("site", ""), each["reason"], each["detail"])
            calls[key] = calls.get(key, 0) + each["count"]
    found = [
        Fallback(kind=kind, site=site, reason=reason, detail=detail, calls=count)
        for (kind, site, reason, detail), count in calls.items()
    ]
    return tuple(sorted(found, key=lambda fallback: -fallback.calls))


def _digests(result: RunResult, stage: str) -> dict[str, str]:
    if stage == REQUEST:
        return result.digests
    return {name: digest for name, digest in result.digests.items() if name.startswith(f"{stage}.")}


def _same_bits(digests: dict[str, str], eager: dict[str, str]) -> bool | None:
    return digests == eager if digests or eager else None


def _sum(rows: list[dict[str, Any]], key: str) -> Any:
    measured = [row[key] for row in rows if row[key] is not None]
    return sum(measured) if measured else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
