"""`accel=auto`: measures on the true request what each stage gains from, and chooses.

Every candidate runs all stages alike, beside an eager pipeline on the same weights. Graphs and fused kernels
of one stage do not change the times of others, so that one candidate is measured for every stage at once.
Source: graph spec section 15, item 8.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import torch

from accel.graphs.stats import MIN_GAIN
from accel.measure.timing import median
from accel.policy import AccelPolicy, Loop
from accel.record import Reason, RunRecord
from accel.region import LoopMode, loop_bodies_of, regions_of
from accel.selection import (
    OFF,
    Candidate,
    Choice,
    Graphs,
    Measured,
    StageMeasurements,
    policy_of,
    select,
)
from pipelines.paired_timing import Arm, StageTimes, TimedPipeline, time_pair
from pipelines.progress import NULL_PROGRESS, Progress

_log = logging.getLogger("samebit")

# Eager, and the candidate.
Pair: TypeAlias = tuple[StageTimes, StageTimes]

# Timed calls of a candidate, and as many eager ones in between.
CALLS = 10
# After so many a candidate that loses in every stage is given up.
CALLS_TO_LOSE = 4
# So many at least: eager and candidate by turns, A B B A.
LEAST_CALLS = 2


@dataclass(frozen=True, kw_only=True)
class AutoChoice:
    """policy: with nothing left to choose. stages: by name, without those that the user set.

    not_tried: why candidates were not measured. seconds: wall time that all this took.
    """

    policy: AccelPolicy
    stages: Mapping[str, Choice]
    not_tried: Mapping[Candidate, str]
    seconds: float


def choose(
    pipeline: TimedPipeline,
    request: Any,
    policy: AccelPolicy,
    *,
    progress: Progress = NULL_PROGRESS,
    clock: Callable[[], float] = time.perf_counter,
) -> AutoChoice:
    """What each stage of the pipeline is to do for requests like this one.

    pipeline: lends its components; it is not run itself. policy: the bounds: graphs kept, memory of a stage,
    sites that may fuse, time. Stages that it sets by themselves stay as they are. clock: seconds.
    Without CUDA everything is off, at once. Makes and closes pipelines and runs the request over and over.
    """
    if torch.device(pipeline.description.device).type != "cuda":
        stages = _off(_adjustable(pipeline, policy), str(Reason.NO_CUDA))
        return AutoChoice(policy=_policy(policy, stages), stages=stages, not_tried={}, seconds=0.0)
    return measure(pipeline, request, policy, progress=progress, clock=clock)


def measure(
    pipeline: TimedPipeline,
    request: Any,
    policy: AccelPolicy,
    *,
    progress: Progress = NULL_PROGRESS,
    clock: Callable[[], float] = time.perf_counter,
) -> AutoChoice:
    """As `choose`, whatever the device."""
    began = clock()
    wanted = candidates(pipeline, policy)
    with contextlib.closing(_Search(pipeline, request, policy, clock)) as search:
        progress.start("candidates", len(wanted))
        for candidate in wanted:
            search.consider(candidate)
            progress.advance("candidates")
        progress.finish("candidates")
        stages = select(search.measurements(), memory_budget_mb=policy.memory_budget_mb)
        stages |= _off(search.idle, "this request calls none of its regions")
    return AutoChoice(
        policy=_policy(policy, stages),
        stages=stages,
        not_tried=search.not_tried,
        seconds=clock() - began,
    )


def candidates(pipeline: TimedPipeline, policy: AccelPolicy) -> list[Candidate]:
    """All but `OFF`, those first that gain most as a rule: time may run out."""
    own = {body.mode for stage in pipeline.stages for body in loop_bodies_of(stage)}
    modes: tuple[LoopMode, ...] = get_args(LoopMode)
    loops: list[Loop] = [*sorted(modes, key=lambda mode: mode not in own)] if own else ["auto"]
    fusing = (True, False) if any(policy.fused.values()) else (False,)
    graphs: tuple[Graphs, ...] = ("full", "segmented")
    full, segmented = (
        [Candidate(graphs=kind, loop=loop, fused=fused) for fused in fusing for loop in loops]
        for kind in graphs
    )
    fused = [Candidate(fused=True)] if True in fusing else []
    return [*full[: len(loops)], *fused, *full[len(loops) :], *segmented]


def _adjustable(pipeline: TimedPipeline, policy: AccelPolicy) -> list[str]:
    """Names of the stages with regions, without those that the user set."""
    return [
        stage.name
        for stage in pipeline.stages
        if stage.name not in policy.stages and (any(regions_of(stage)) or any(loop_bodies_of(stage)))
    ]


def _off(stages: Iterable[str], reason: str) -> dict[str, Choice]:
    return {stage: Choice(candidate=OFF, reason=reason) for stage in stages}


def _policy(base: AccelPolicy, stages: Mapping[str, Choice]) -> AccelPolicy:
    return policy_of(base, {name: choice.candidate for name, choice in stages.items()})


class _Search:
    """Measures candidates one after the other: the graphs of one alone take memory.

    not_tried: why candidates were not measured. idle: stages whose regions the request does not call.
    """

    def __init__(
        self, pipeline: TimedPipeline, request: Any, policy: AccelPolicy, clock: Callable[[], float]
    ) -> None:
        assert policy.auto_seconds is not None
        self.not_tried: dict[Candidate, str] = {}
        self._pipeline = pipeline
        self._request = request
        self._policy = policy
        self._clock = clock
        self._began = clock()
        self._deadline = self._began + policy.auto_seconds
        self._adjustable = _adjustable(pipeline, policy)
        self._fuses: bool | None = None  # any site; unknown before the first candidate that may
        self._breaks: bool | None = None  # full graphs: something can't be captured
        self._longest = 0.0  # seconds of a candidate with the fewest calls; 0 before one is measured
        self._eager = eager = self._arm(OFF)
        self._digests = eager.first()
        # What the request calls: always, after a stage has forgotten its results, or never.
        eager.time()
        eager.forgets = self._without_calls()
        times = eager.time()
        self.idle = self._without_calls()
        self._eager_walls = {name: [times[name]] for name in self._adjustable if name not in self.idle}
        self._measured: dict[str, dict[Candidate, Measured]] = {name: {} for name in self._eager_walls}

    def consider(self, candidate: Candidate) -> None:
        """Measure it, or say in `not_tried` why not."""
        began, is_first = self._clock(), not self._longest
        why_not = self._needless(candidate) or self._try(candidate)
        if why_not:
            self.not_tried[candidate] = why_not
            _log.info("accel=auto: %s not tried: %s", candidate, why_not)
        elif is_first and self._late(self._longest):
            self._warn(candidate, self._clock() - began)

    def measurements(self) -> dict[str, StageMeasurements]:
        """Of every stage that is not idle."""
        self._eager.profile()
        looping = {stage.name for stage in self._pipeline.stages if any(loop_bodies_of(stage))}
        return {
            name: StageMeasurements(
                eager_ms=median(walls),
                in_every_request=name not in self._eager.forgets,
                has_loop=name in looping,
                by_candidate={OFF: _measured(self._eager, name, walls, walls), **self._measured[name]},
            )
            for name, walls in self._eager_walls.items()
        }

    def close(self) -> None:
        self._eager.close()

    def _without_calls(self) -> list[str]:
        """Stages whose regions were not called by the last request."""
        stages = self._eager.record.stages
        return [name for name in self._adjustable if not stages[name].outcomes]

    def _arm(self, candidate: Candidate, forgets: Collection[str] = ()) -> Arm:
        policy = policy_of(self._policy, dict.fromkeys(self._adjustable, candidate))
        return Arm(self._pipeline.with_policy(policy), self._request, forgets=forgets)

    def _needless(self, candidate: Candidate) -> str:
        """Why a measurement would tell nothing, or can't be made; empty if there is no such reason."""
        if candidate.fused and self._fuses is False:
            return "no site ran fused"
        if candidate.graphs == "segmented" and self._breaks is False:
            return "full graphs capture everything"
        if self._late(self._longest):
            return f"no time left (accel.auto_seconds={self._policy.auto_seconds:g})"
        return ""

    def _try(self, candidate: Candidate) -> str:
        """Empty, or why there is no measurement."""
        try:
            why_not = self._measure(candidate)
        except torch.OutOfMemoryError:
            why_not = "out of memory"
        gc.collect()  # stages and what is bound on them refer to each other; the next needs their memory
        return why_not

    def _measure(self, candidate: Candidate) -> str:
        """As `_try`. Raises: torch.OutOfMemoryError."""
        began = self._clock()
        with contextlib.closing(self._arm(candidate, self._eager.forgets)) as arm:
            if arm.first() != self._digests:
                return "its outputs differ from eager ones"
            self._learn(candidate, arm.record)
            arm.time()  # what is captured only now
            pairs = self._pairs(arm, began)
            if len(pairs) < LEAST_CALLS:
                return f"no time left after {len(pairs)} of at least {LEAST_CALLS} calls"
            if not self._given_up(pairs):
                arm.profile()
            for name, walls in self._eager_walls.items():
                eager, timed = ([times[name] for times in side] for side in zip(*pairs, strict=True))
                self._measured[name][candidate] = _measured(arm, name, timed, eager)
                walls += eager
        return ""

    def _pairs(self, arm: Arm, began: float) -> list[Pair]:
        """Timed calls by turns, fewer than `CALLS` if the candidate is given up or time runs out.

        began: when making the arm did.
        """
        pairs: list[Pair] = []
        while len(pairs) < CALLS and not self._given_up(pairs) and not self._late():
            pairs.append(time_pair(len(pairs), self._eager, arm))
            if len(pairs) == LEAST_CALLS:
                self._longest = max(self._longest, self._clock() - began)
        return pairs

    def _late(self, seconds: float = 0.0) -> bool:
        """Whether what takes so long would end too late; nothing does before one candidate is measured."""
        return self._longest > 0 and self._clock() + seconds > self._deadline

    def _warn(self, first: Candidate, seconds: float) -> None:
        """Say that no other follows, and how long all calls of the first and the fewest of another take."""
        elapsed = self._clock() - self._began
        enough = math.ceil(elapsed + CALLS / LEAST_CALLS * self._longest)
        _log.warning(
            "accel=auto: %s took %.0f s, which leaves no time for others (accel.auto_seconds=%g). "
            "Set it to %d or more to measure more.",
            *(first, seconds, self._policy.auto_seconds, enough),
        )

    def _learn(self, candidate: Candidate, record: RunRecord) -> None:
        """From the first call, in which everything is captured and verified."""
        stages = record.stages.values()
        if candidate.fused:
            self._fuses = any(site.fused for stage in stages for site in stage.sites)
        if candidate.graphs == "full":
            self._breaks = any(
                outcome.reason is Reason.CAPTURE_FAILED for stage in stages for outcome in stage.outcomes
            )

    def _given_up(self, pairs: Sequence[Pair]) -> bool:
        """Whether even its best call is slower, in every stage, than what the best so far would take."""
        return len(pairs) == CALLS_TO_LOSE and all(
            min(timed[name] for _, timed in pairs)
            > (1 + MIN_GAIN)
            * median([eager[name] for eager, _ in pairs])
            * min((1.0, *(measured.relative for measured in measured_so_far.values())))
            for name, measured_so_far in self._measured.items()
        )


def _measured(arm: Arm, stage: str, walls: Sequence[float], eager: Sequence[float]) -> Measured:
    record = arm.record.stage(stage)
    return Measured(
        relative=median(walls) / median(eager),
        calls=len(walls),
        held_bytes=record.extra_bytes,
        copied_in=record.copied_in,
        launches=record.launches,
        gpu_busy_ms=record.gpu_busy_ms,
    )
