"""What happened to every region call and every fusion site of a run.

Free of torch. `RunRecord` accumulates while a pipeline runs and is what tables and
`result.json` are made from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, TypeAlias, TypeVar

# What acceleration may do to the bits of a result, from nothing to most. `moved_rounding`: the same
# mathematics and precision, rounded at other places. `compiled`: what a compiler does.
Tier: TypeAlias = Literal["exact", "moved_rounding", "compiled"]


class Reason(StrEnum):
    """Why a region ran eager, or a site ran its reference expression."""

    DISABLED = "disabled"
    NO_CUDA = "no_cuda"
    MULTI_GPU = "multi_gpu"
    COMPONENT_OFFLOADED = "component_offloaded"
    GRAD_ENABLED = "grad_enabled"
    TRAINING_MODE = "training_mode"
    FORWARD_HOOK = "forward_hook"
    UNSUPPORTED_INPUT = "unsupported_input"
    UNSUPPORTED_OUTPUT = "unsupported_output"
    NESTED_CAPTURE = "nested_capture"
    CACHE_FULL = "cache_full"
    BLOCKED_SIGNATURE = "blocked_signature"
    CAPTURE_FAILED = "capture_failed"
    CANARY_MISMATCH = "canary_mismatch"
    REPLAY_FAILED = "replay_failed"
    TOO_MANY_SEGMENTS = "too_many_segments"
    BREAK_IN_SIDE_STREAM = "break_in_side_stream"
    GUARD_FAILED = "guard_failed"
    NOT_WARMED = "not_warmed"
    OVER_BUDGET = "over_budget"
    OOM = "oom"
    # torch.compile only
    COMPILE_FAILED = "compile_failed"
    RECOMPILE_LIMIT = "recompile_limit"
    NOTHING_TO_COMPILE = "nothing_to_compile"
    # Fusion sites only
    NO_TRITON = "no_triton"
    UNVERIFIED = "unverified"
    MISMATCH = "mismatch"
    KERNEL_ERROR = "kernel_error"
    TRACING = "tracing"
    LOW_MEMORY = "low_memory"
    # Mounted forwards only
    STRUCTURE_CHANGED = "structure_changed"
    UNSUPPORTED_MODULE = "unsupported_module"


class Kind(StrEnum):
    """What a region call turned out to be."""

    REPLAYED = "replayed"
    CAPTURED = "captured"
    COMPILED = "compiled"
    EAGER = "eager"


@dataclass(frozen=True)
class Outcome:
    """One region call. `reason` and `detail` are set for `eager` alone.

    detail: names the op, argument or field, e.g. "aten::item" or "latents: shape (1, 8) vs (1, 4)".
    """

    kind: Kind
    reason: Reason | None = None
    detail: str = ""

    def __str__(self) -> str:
        return self.kind if self.reason is None else f"{self.kind} ({self.reason})"


@dataclass(frozen=True)
class SiteOutcome:
    """One call of a fusion site: fused, or the reference expression with the reason.

    Likewise of a saving that the policy allows: taken (`fused`) or not.
    """

    site: str
    fused: bool
    reason: Reason | None = None
    detail: str = ""

    def __str__(self) -> str:
        return "fused" if self.fused else f"reference ({self.reason})"


AnyOutcome = TypeVar("AnyOutcome", Outcome, SiteOutcome)


@dataclass(frozen=True)
class MountReport:
    """What became of one class of blocks of one model: all of them got a forward with fusion sites, or none.

    block: class name. blocks: how many the model has. reason, detail: why they keep their stock forward.
    """

    block: str
    blocks: int
    mounted: bool
    reason: Reason | None = None
    detail: str = ""

    def __str__(self) -> str:
        return "mounted" if self.mounted else f"stock forward ({self.reason})"


# Kept of each stage, for a server runs for ever: times, and outcomes told apart by their detail.
MAX_WALLS = 10_000
MAX_DETAILS = 256


@dataclass
class StageRecord:
    """Everything measured for one stage.

    tier: `compiled` once a value came from compiled code, `moved_rounding` once a saving was taken: from
        then on graphs that hold it may be replayed.
    cold_ms: wall time of the first call, captures and verification included.
    walls_ms: times of later calls on the device's clock, host waits included; the last `MAX_WALLS`.
    launches, gpu_busy_ms, host_launches: one profiled call; `None` where there is no CUDA. See
        `accel.measure.profile.DeviceActivity`.
    extra_bytes: device memory held by the stage's graphs and static buffers.
    copied_in: bytes that one replay of each live graph copies into fixed inputs, summed.
    capture_ms: time spent capturing, summed.
    compile_ms: wall time of calls that compiled, since the pipeline was made.
    entries: live graphs. evictions: graphs that made room for others.
    mounts: forwards bound on the blocks of library models; those that are not allowed are left out.
    breaks: where segmented graphs leave the device to Python, "file:line op (kind)", in order.
    """

    name: str
    tier: Tier = "exact"
    cold_ms: float | None = None
    walls_ms: list[float] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    sites: Counter[SiteOutcome] = field(default_factory=Counter)
    launches: int | None = None
    gpu_busy_ms: float | None = None
    host_launches: int | None = None
    extra_bytes: int = 0
    copied_in: int = 0
    capture_ms: float = 0.0
    compile_ms: float = 0.0
    entries: int = 0
    evictions: int = 0
    breaks: list[str] = field(default_factory=list)
    mounts: list[MountReport] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float | None:
        """Replayed calls over all region calls, 0..1; `None` for a stage without region calls."""
        calls = sum(self.outcomes.values())
        replayed = sum(n for outcome, n in self.outcomes.items() if outcome.kind is Kind.REPLAYED)
        return replayed / calls if calls else None

    @property
    def latest_ms(self) -> float | None:
        """Wall time of the last call, cold or not; `None` before the first."""
        return self.walls_ms[-1] if self.walls_ms else self.cold_ms

    def count(self, outcome: Outcome | SiteOutcome) -> None:
        """One more of these; with `MAX_DETAILS` of them known, new ones lose their detail."""
        if isinstance(outcome, Outcome):
            _count(self.outcomes, outcome)
        else:
            _count(self.sites, outcome)

    def add_wall(self, ms: float) -> None:
        """The first call is cold; the rest are steady state."""
        if self.cold_ms is None:
            self.cold_ms = ms
            return
        self.walls_ms.append(ms)
        del self.walls_ms[:-MAX_WALLS]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; counters become lists of rows."""
        return {
            "name": self.name,
            "tier": self.tier,
            "cold_ms": self.cold_ms,
            "walls_ms": self.walls_ms,
            "outcomes": [
                {"kind": o.kind.value, "reason": _text(o.reason), "detail": o.detail, "count": n}
                for o, n in self.outcomes.items()
            ],
            "hit_ratio": self.hit_ratio,
            "sites": [
                {"site": s.site, "fused": s.fused, "reason": _text(s.reason), "detail": s.detail, "count": n}
                for s, n in self.sites.items()
            ],
            "launches": self.launches,
            "gpu_busy_ms": self.gpu_busy_ms,
            "host_launches": self.host_launches,
            "extra_bytes": self.extra_bytes,
            "copied_in": self.copied_in,
            "capture_ms": self.capture_ms,
            "compile_ms": self.compile_ms,
            "entries": self.entries,
            "evictions": self.evictions,
            "breaks": self.breaks,
            "mounts": [
                {
                    "block": m.block,
                    "blocks": m.blocks,
                    "mounted": m.mounted,
                    "reason": _text(m.reason),
                    "detail": m.detail,
                }
                for m in self.mounts
            ],
        }


@dataclass
class RunRecord:
    """Stage records in pipeline order."""

    stages: dict[str, StageRecord] = field(default_factory=dict)

    def stage(self, name: str) -> StageRecord:
        """The stage's record, made on first use."""
        record = self.stages.get(name)
        return record if record is not None else self.stages.setdefault(name, StageRecord(name))

    def to_dict(self) -> list[dict[str, Any]]:
        return [stage.to_dict() for stage in self.stages.values()]


def _count(counter: Counter[AnyOutcome], outcome: AnyOutcome) -> None:
    known = counter.get(outcome)
    if known is not None:
        counter[outcome] = known + 1
        return
    counter[outcome if len(counter) < MAX_DETAILS else replace(outcome, detail="")] += 1


def _text(reason: Reason | None) -> str | None:
    return None if reason is None else reason.value
