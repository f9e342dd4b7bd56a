"""Which way to run each stage, given what was measured: the pure half of `accel=auto`.

Graph spec sections 1 and 15, item 8: a graph removes host work alone, and costs memory and copies, so that
a stage may well lose by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from accel.graphs.stats import MIN_GAIN
from accel.policy import AccelPolicy, Loop, StageOverride

Graphs = Literal["off", "full", "segmented"]

# What simpler choices may cost a whole request, against the best policy that is the same for all stages.
MAX_REGRET = 0.02
_GRAPHS: tuple[Graphs, ...] = get_args(Graphs)
_LOOPS: tuple[Loop, ...] = get_args(Loop)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a stage. loop: how graphs capture its loop. fused: whether sites that may fuse do."""

    graphs: Graphs = "off"
    loop: Loop = "auto"
    fused: bool = False

    def __str__(self) -> str:
        loop = f" (loop: {self.loop})" if self.loop != "auto" else ""
        graphs = [] if self.graphs == "off" else [f"{self.graphs} graphs{loop}"]
        return " + ".join(graphs + ["fused"] * self.fused) or "off"

    @property
    def complexity(self) -> tuple[int, bool, int]:
        """Sorts candidates, simplest first."""
        return _GRAPHS.index(self.graphs), self.fused, _LOOPS.index(self.loop)

    def override(self, common: Mapping[str, bool]) -> StageOverride:
        """What a stage sets by itself. common: sites that may fuse in other stages."""
        fused = {} if self.fused else {site: False for site, on in common.items() if on}
        if self.graphs == "off":
            return StageOverride(enable_cuda_graph=False, fused=fused)
        return StageOverride(enable_cuda_graph=True, graph_mode=self.graphs, loop=self.loop, fused=fused)


OFF = Candidate()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One stage under one candidate.

    relative: median wall time over that of eager calls in between. calls: how many of each. held_bytes:
    device memory of its graphs. copied_in: bytes per replay. launches, gpu_busy_ms: of one profiled call,
    `None` where none was profiled.
    """

    relative: float
    calls: int
    held_bytes: int = 0
    copied_in: int = 0
    launches: int | None = None
    gpu_busy_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class StageMeasurements:
    """eager_ms: median wall time. by_candidate: always with `OFF`.

    in_every_request: some stages keep results, e.g. encoded captions, and are measured without. has_loop:
    whether candidates that differ in `loop` do.
    """

    eager_ms: float
    in_every_request: bool
    has_loop: bool
    by_candidate: Mapping[Candidate, Measured]

    def ms(self, candidate: Candidate) -> float:
        return self.eager_ms * self.by_candidate[candidate].relative

    def meaning(self, candidate: Candidate) -> Candidate:
        """The candidate without what has no effect here."""
        return candidate if self.has_loop else replace(candidate, loop="auto")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one stage is to do, and why. measured: `None` where nothing was."""

    candidate: Candidate
    reason: str
    measured: Measured | None = None
    eager_ms: float | None = None


def select(stages: Mapping[str, StageMeasurements], *, memory_budget_mb: int | None) -> dict[str, Choice]:
    """For each stage the simplest candidate that no other beats by more than `MIN_GAIN`.

    Where that would cost a request more than `MAX_REGRET` against the best policy that is the same for all
    stages, stages take their fastest candidate, those that lose most first. A candidate whose graphs hold
    more than `memory_budget_mb` (MiB, of one stage) is never taken. Equal measurements give equal choices.
    """
    fitting = {name: _fitting(stage, memory_budget_mb) for name, stage in stages.items()}
    chosen = {name: _simplest_good(stage) for name, stage in fitting.items()}
    for name in _too_slow_together(fitting, chosen):
        chosen[name] = _fastest(fitting[name])
    return {
        name: Choice(
            candidate=stages[name].meaning(candidate),
            reason=_reason(stages[name], fitting[name], candidate),
            measured=stages[name].by_candidate[candidate],
            eager_ms=stages[name].eager_ms,
        )
        for name, candidate in chosen.items()
    }


def policy_of(base: AccelPolicy, chosen: Mapping[str, Candidate]) -> AccelPolicy:
    """The policy that runs each stage as chosen, and nothing is left to choose.

    Stages that `base` sets by itself stay as they are. What is common is on where a stage uses it.
    """
    some_fuse = any(candidate.fused for candidate in chosen.values())
    fused = base.fused if some_fuse else dict.fromkeys(base.fused, False)
    own = {stage: StageOverride(**asdict(base.for_stage(stage))) for stage in base.stages}
    return replace(
        base,
        auto_seconds=None,
        enable_cuda_graph=any(candidate.graphs != "off" for candidate in chosen.values()),
        fused=fused,
        stages={stage: candidate.override(fused) for stage, candidate in chosen.items()} | own,
    )


def _fitting(stage: StageMeasurements, memory_budget_mb: int | None) -> StageMeasurements:
    if memory_budget_mb is None:
        return stage
    limit = memory_budget_mb << 20
    held = {c: m for c, m in stage.by_candidate.items() if m.held_bytes <= limit}
    return replace(stage, by_candidate=held)


def _fastest(stage: StageMeasurements) -> Candidate:
    measured = stage.by_candidate
    return min(measured, key=lambda candidate: (measured[candidate].relative, candidate.complexity))


def _simplest_good(stage: StageMeasurements) -> Candidate:
    measured = stage.by_candidate
    best = measured[_fastest(stage)].relative
    good = [c for c in measured if best >= measured[c].relative * (1 - MIN_GAIN)]
    return min(good, key=lambda candidate: candidate.complexity)


def _too_slow_together(stages: Mapping[str, StageMeasurements], chosen: Mapping[str, Candidate]) -> list[str]:
    """The fewest stages that have to be faster than the simplest good candidate makes them."""
    counted = {name: stage for name, stage in stages.items() if stage.in_every_request}
    if not counted:
        return []
    common = set.intersection(*(set(stage.by_candidate) for stage in counted.values()))
    best = min(sum(stage.ms(candidate) for stage in counted.values()) for candidate in common)
    excess = {name: stage.ms(chosen[name]) - stage.ms(_fastest(stage)) for name, stage in counted.items()}
    total = sum(stage.ms(chosen[name]) for name, stage in counted.items())
    faster = []
    for name in sorted(counted, key=lambda name: (-excess[name], name)):
        if total <= best * (1 + MAX_REGRET):
            break
        total -= excess[name]
        faster.append(name)
    return faster


def _reason(stage: StageMeasurements, fitting: StageMeasurements, chosen: Candidate) -> str:
    """One line, e.g. "saves 41.3 %; full graphs + fused, 42.0 %, gains not over 3 % on it"."""
    fastest = _fastest(fitting)
    name = stage.meaning(fastest)
    saved, most = (100 * (1 - fitting.by_candidate[c].relative) for c in (chosen, fastest))
    if len(stage.by_candidate) == 1:
        return "nothing else was measured"
    if chosen == fastest:
        text = f"saves {saved:.1f} %, the most" if chosen != OFF else "nothing is faster"
    elif chosen == OFF:
        text = f"{name} saves {most:.1f} %, not over {100 * MIN_GAIN:.0f} %"
    else:
        text = f"saves {saved:.1f} %; {name}, {most:.1f} %, gains not over {100 * MIN_GAIN:.0f} % on it"
    excluded = [stage.meaning(c) for c in stage.by_candidate if c not in fitting.by_candidate]
    return text + (f"; over the memory budget: {'; '.join(map(str, excluded))}" if excluded else "")
