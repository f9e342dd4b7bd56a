"""Binds the acceleration policy to stages, runs their regions, and records what happened."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from accel.bound_stage import BoundStage
from accel.compiled import CompiledStage
from accel.fusion.mounting import Mount
from accel.fusion.scope import Scope
from accel.graphs.backend import GraphBackend
from accel.graphs.buffers import Tokens
from accel.graphs.capture import Record
from accel.graphs.cuda import CudaBackend
from accel.graphs.modules import ModuleWatch
from accel.graphs.results import Outputs
from accel.graphs.segmented import SegmentedRecorder
from accel.graphs.whole import WholeGraph
from accel.loops import BoundLoop, ChainLoop, StepLoop, WholeLoop
from accel.measure.timing import Lap, synchronize
from accel.policy import AccelPolicy, StagePolicy
from accel.record import Kind, MountReport, Outcome, Reason, RunRecord, SiteOutcome
from accel.region import LoopBody, loop_bodies_of, regions_of
from accel.site_names import SAVING_NAMES

# Eager by request, or part of a graph that encloses the call.
_PLANNED = (Reason.DISABLED, Reason.NESTED_CAPTURE)

Call = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Outcome]]


class BindableStage(Protocol):
    """What the runner needs of a stage; `stages.stage.Stage` has it."""

    @property
    def name(self) -> str: ...

    def modules(self) -> Mapping[str, nn.Module]: ...

    def mounts(self, allowed: frozenset[str]) -> Sequence[Mount]: ...


@dataclass(frozen=True)
class BoundRegion:
    """A function that the runner captures: a region, or what a loop made of its body.

    call: the function with graphs, fusion scope and record; it carries the function's own signature
        and annotations.
    """

    stage: str
    name: str
    graph: WholeGraph
    call: Callable[..., Any]


class Runner:
    """Runs regions as the policy says.

    device: where the regions' tensors live. backend: how graphs are made; by default CUDA graphs on
    a CUDA device and none elsewhere, where every region runs eager with the reason `no_cuda`.
    """

    def __init__(
        self, policy: AccelPolicy, *, device: torch.device, backend: GraphBackend | None = None
    ) -> None:
        self._record = RunRecord()
        self._lock = threading.Lock()  # the record is written by every thread that calls a region
        self._policy = policy
        self._device = device
        self._backend = CudaBackend(device) if backend is None and device.type == "cuda" else backend
        self._regions: defaultdict[str, list[BoundRegion]] = defaultdict(list)
        self._compiled: dict[str, CompiledStage] = {}
        # Stages that took a saving. Their graphs replay it without telling.
        self._saving: set[str] = set()
        self._mounts: dict[str, list[MountReport]] = {}
        self._laps: list[tuple[str, Lap]] = []
        # What earlier records told, by stage.
        self._told: defaultdict[str, _Spent] = defaultdict(_Spent)

    @property
    def record(self) -> RunRecord:
        """What happened since `new_record`; reading it brings what the graphs hold and cost up to date."""
        with self._lock:
            for name in self._record.stages:
                self._describe_graphs(name)
        return self._record

    @property
    def regions(self) -> list[BoundRegion]:
        """Everything bound so far that may be captured, in order."""
        return [region for regions in self._regions.values() for region in regions]

    def bind(self, stage: BindableStage) -> None:
        """Replace every region and loop body of this stage object by its accelerated form."""
        policy = self._policy.for_stage(stage.name)
        backend = self._backend if policy.enable_cuda_graph else None
        watch = None if backend is None else ModuleWatch(stage.modules, backend.device)
        compiled = CompiledStage.of(policy, stage.modules)
        if compiled is not None:
            self._compiled[stage.name] = compiled
        bound = BoundStage(stage.name, policy, backend, watch, compiled)
        reports = [mount.report for mount in stage.mounts(bound.allowed)]
        self._mounts[stage.name] = [report for report in reports if report.reason is not Reason.DISABLED]
        for name, method in regions_of(stage):
            setattr(stage, name, self._accelerated(bound, name, method))
        for body in loop_bodies_of(stage):
            setattr(stage, body.name, self._bound_loop(bound, body))

    def finish_warm_up(self) -> None:
        """From now on stages with `capture=explicit` replay the graphs they have and capture no more."""
        for region in self.regions:
            if self._policy.for_stage(region.stage).capture == "explicit":
                region.graph.allow_capture = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around the stages of one request: waits for the device and adds their times to the record.

        A request that raises counts in no stage.
        """
        self._laps.clear()
        yield
        synchronize(self._device)
        for name, lap in self._laps:
            self._record.stage(name).add_wall(lap.ms)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure one call of a stage of a request.

        The host does not wait for the device here: it prepares the next stage meanwhile.
        """
        lap = Lap(self._device)
        yield
        lap.end()
        self._laps.append((name, lap))

    def new_record(self) -> None:
        """Start a fresh record; graphs stay."""
        self._record = RunRecord()
        self._told.update({stage: self._spent(stage) for stage in self._regions})

    def strict_violations(self) -> list[str]:
        """What the record shows as eager or unfused though it was to be accelerated.

        One line for each stage and reason, e.g. "denoising: reference (mismatch): swiglu, modulate".
        """
        found: dict[tuple[str, str, str], list[str]] = {}
        for stage in self._record.stages.values():
            outcomes: tuple[Outcome | SiteOutcome, ...] = (*stage.outcomes, *stage.sites)
            for outcome in outcomes:
                if outcome.reason is None or outcome.reason in _PLANNED:
                    continue
                names = found.setdefault((stage.name, str(outcome), outcome.detail), [])
                if isinstance(outcome, SiteOutcome):
                    names.append(outcome.site)
            for report in self._mounts.get(stage.name, ()):
                if not report.mounted:
                    found.setdefault((stage.name, str(report), report.detail), []).append(report.block)
        return [
            ": ".join(filter(None, (stage_name, text, ", ".join(names), detail)))
            for (stage_name, text, detail), names in found.items()
        ]

    def close(self) -> None:
        """Free all graphs, fixed inputs and compiled code.

        Bound stages still run, and capture and compile anew when called.
        """
        for region in self.regions:
            region.graph.close()
        for compiled in self._compiled.values():
            compiled.close()

    def _bound_loop(self, stage: BoundStage, body: LoopBody) -> BoundLoop:
        accelerate = functools.partial(self._accelerated, stage, body.name)
        mode = body.mode if stage.policy.loop == "auto" else stage.policy.loop
        if stage.backend is None or mode == "step":
            return StepLoop(body.method, accelerate)
        if mode == "whole":
            return WholeLoop(body.method, accelerate)
        return ChainLoop(body.method, accelerate, stage.backend)

    def _accelerated(
        self,
        stage: BoundStage,
        name: str,
        fn: Callable[..., Any],
        *,
        outputs: Outputs = "clone",
        tokens: Callable[[], Tokens] = dict,
    ) -> Callable[..., Any]:
        if stage.compiled is not None:
            region = stage.compiled.region(fn, name=f"{stage.name}.{name}")
            return self._recorded(stage, fn, region.call)
        if stage.backend is None:
            return self._recorded(stage, fn, _eager(fn, stage.policy))
        assert stage.watch is not None
        graph = WholeGraph(
            fn,
            name=f"{stage.name}.{name}",
            backend=stage.backend,
            watch=stage.watch,
            policy=stage.policy,
            fused=stage.allowed,
            record=_recorder(stage, stage.backend, name=f"{stage.name}.{name}"),
            outputs=outputs,
            persistent=tokens().keys(),
            budget=stage.budget,
        )
        call = self._recorded(stage, fn, lambda args, kwargs: graph.call(args, kwargs, tokens=tokens()))
        self._regions[stage.name].append(BoundRegion(stage.name, name, graph, call))
        return call

    def _recorded(self, stage: BoundStage, fn: Callable[..., Any], call: Call) -> Callable[..., Any]:
        """`call` in the form of `fn`, inside the stage's fusion scope."""

        def observe(outcome: SiteOutcome) -> None:
            with self._lock:
                self._record.stage(stage.name).count(outcome)
                if outcome.fused and outcome.site in SAVING_NAMES:
                    self._saving.add(stage.name)

        scope = Scope(stage.allowed, observe)

        @functools.wraps(fn)
        def region(*args: Any, **kwargs: Any) -> Any:
            with scope.entered():
                value, outcome = call(args, kwargs)
            with self._lock:
                self._record.stage(stage.name).count(outcome)
            return value

        return region

    def _describe_graphs(self, stage: str) -> None:
        record, graphs = self._record.stage(stage), [region.graph for region in self._regions[stage]]
        spent, told = self._spent(stage), self._told[stage]
        record.extra_bytes = sum(graph.extra_bytes for graph in graphs)
        record.entries = sum(map(len, graphs))
        record.capture_ms = spent.capture_ms - told.capture_ms
        record.breaks = [str(each) for graph in graphs for each in graph.breaks]
        record.mounts = list(self._mounts.get(stage, ()))
        record.evictions = spent.evictions - told.evictions
        record.copied_in = sum(entry.copied_in for graph in graphs for entry in graph.stats().entries)
        if stage in self._saving:
            record.tier = "moved_rounding"
        if stage in self._compiled:
            record.tier, record.compile_ms = self._compiled[stage].tier, self._compiled[stage].compile_ms

    def _spent(self, stage: str) -> _Spent:
        graphs = [region.graph for region in self._regions[stage]]
        return _Spent(sum(g.capture_ms for g in graphs), sum(g.evictions for g in graphs))


@dataclass(frozen=True)
class _Spent:
    """Totals of a stage's graphs since it was bound."""

    capture_ms: float = 0.0
    evictions: int = 0


def _eager(fn: Callable[..., Any], policy: StagePolicy) -> Call:
    outcome = Outcome(Kind.EAGER, Reason.NO_CUDA if policy.enable_cuda_graph else Reason.DISABLED)
    return lambda args, kwargs: (fn(*args, **kwargs), outcome)


def _recorder(stage: BoundStage, backend: GraphBackend, *, name: str) -> Record:
    if stage.policy.graph_mode == "full":
        return backend.capture
    return SegmentedRecorder(backend, max_segments=stage.policy.max_segments, name=name)
