"""What was measured of one stage of one job, beside the same stage of its eager job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from accel.record import Reason
from tasks.comparison.findings import REQUEST, Findings, OwnReference, StageRow


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """Calls that ran eager, a fusion site that ran its reference, or blocks that kept their own forward,
    although nobody switched it off.

    kind: "eager", "reference" or "not mounted". site: the fusion site, or the kind of block; else empty.
    """

    kind: str
    site: str
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
    speed_up: p50 of the eager job, or of the job's own reference, over this p50.
    gpu_busy: 0..1, the share of the p50 in which the GPU computed.
    launches: kernels, copies and fills on the GPU; host_launches: calls by which the host started them.
    extra_bytes: device memory held by graphs and their buffers.
    equal: whether all outputs have the bits of the same one; `None` where that is not known.
    relative_error: L2, of the output that is farthest from the same one; where the job itself measured it.
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
    relative_error: float | None = None
    fallbacks: tuple[Fallback, ...] = ()


def figures_of(found: Findings, eager: Findings | None) -> tuple[Figures, ...]:
    """Of whole requests first, then of each stage in the order of the pipeline.

    eager: of the eager job, for findings that have no reference of their own.
    """
    if found.reference is not None:
        return tuple(_beside(found.reference, figure) for figure in _measured(found))
    if eager is None:
        return _measured(found)
    base = {figure.stage: figure for figure in _measured(eager)}
    return tuple(
        replace(
            figure,
            speed_up=_ratio(base[figure.stage].p50_ms, figure.p50_ms) if figure.stage in base else None,
            equal=_same_bits(_digests(found, figure.stage), _digests(eager, figure.stage)),
        )
        for figure in _measured(found)
    )


def _beside(own: OwnReference, figure: Figures) -> Figures:
    stage = figure.stage
    return replace(
        figure,
        speed_up=own.speed_ups.get(stage),
        equal=own.equal.get(stage),
        relative_error=own.errors.get(stage),
    )


def _measured(found: Findings) -> tuple[Figures, ...]:
    rows = found.stages
    total = {
        "name": REQUEST,
        "tier": ", ".join(sorted({row["tier"] for row in rows})),
        "cold_ms": found.cold_ms,
        "walls_ms": found.walls_ms,
        "extra_bytes": sum(row["extra_bytes"] for row in rows),
        **{key: _sum(rows, key) for key in ("launches", "host_launches", "gpu_busy_ms")},
        **{key: [each for row in rows for each in row[key]] for key in ("outcomes", "sites", "mounts")},
    }
    return tuple(_figures(row) for row in (total, *rows))


def _figures(row: StageRow) -> Figures:
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


def _fallbacks(row: StageRow) -> tuple[Fallback, ...]:
    """Like ones added up, most calls first."""
    calls = Counter[tuple[str, str, str, str]]()
    happened = (
        *((each["kind"], "", each, each["count"]) for each in row["outcomes"]),
        *(("reference", each["site"], each, each["count"]) for each in row["sites"]),
        *(("not mounted", each["block"], each, each["blocks"]) for each in row["mounts"]),
    )
    for kind, site, each, count in happened:
        if each["reason"] not in (None, Reason.DISABLED):
            calls[kind, site, each["reason"], each["detail"]] += count
    found = [
        Fallback(kind=kind, site=site, reason=reason, detail=detail, calls=count)
        for (kind, site, reason, detail), count in calls.items()
    ]
    return tuple(sorted(found, key=lambda fallback: -fallback.calls))


def _digests(found: Findings, stage: str) -> Mapping[str, str]:
    if stage == REQUEST:
        return found.digests
    return {name: digest for name, digest in found.digests.items() if name.startswith(f"{stage}.")}


def _same_bits(digests: Mapping[str, str], eager: Mapping[str, str]) -> bool | None:
    return digests == eager if digests or eager else None


def _sum(rows: Sequence[StageRow], key: str) -> Any:
    measured = [row[key] for row in rows if row[key] is not None]
    return sum(measured) if measured else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
