"""Binds the acceleration policy to stages, runs their regions, and records what happened."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from accel.errors import ConfigError
from accel.fusion.scope import fusion_scope
from accel.graphs.backend import GraphBackend
from accel.graphs.cuda import CudaBackend
from accel.graphs.modules import ModuleWatch
from accel.graphs.whole import WholeGraph
from accel.measure.timing import wall_timer
from accel.policy import AccelPolicy, StagePolicy
from accel.record import Kind, Outcome, Reason, RunRecord, SiteOutcome
from accel.region import regions_of

# Eager by request, or part of a graph that encloses the call.
_PLANNED = (Reason.DISABLED, Reason.NESTED_CAPTURE)

Call = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Outcome]]


class BindableStage(Protocol):
    """What the runner needs of a stage; `stages.stage.Stage` has it."""

    @property
    def name(self) -> str: ...

    def modules(self) -> Mapping[str, nn.Module]: ...


class Runner:
    """Runs regions as the policy says.

    device: where the regions' tensors live. backend: how graphs are made; by default CUDA graphs on
    a CUDA device and none elsewhere, where every region runs eager with the reason `no_cuda`.
    """

    def __init__(
        self, policy: AccelPolicy, *, device: torch.device, backend: GraphBackend | None = None
    ) -> None:
        self.record = RunRecord()
        self._lock = threading.Lock()  # the record is written by every thread that calls a region
        self._policy = policy
        self._device = device
        self._backend = CudaBackend(device) if backend is None and device.type == "cuda" else backend
        self._graphs: defaultdict[str, list[WholeGraph]] = defaultdict(list)
        # Capture time of earlier records, by stage.
        self._captured_before: defaultdict[str, float] = defaultdict(float)

    def bind(self, stage: BindableStage) -> None:
        """Replace every region of this stage object by its accelerated form.

        Raises: ConfigError for a graph mode that this version does not run.
        """
        policy = self._policy.for_stage(stage.name)
        if policy.enable_cuda_graph and policy.graph_mode != "full":
            raise ConfigError(
                f"accel.graph_mode={policy.graph_mode} (stage '{stage.name}') is not available in this "
                "version; use accel.graph_mode=full or accel=graph."
            )
        allowed = frozenset(site for site, on in policy.fused.items() if on)
        watch: ModuleWatch | None = None
        for region, method in regions_of(stage):
            call = self._eager(method, policy)
            if policy.enable_cuda_graph and self._backend is not None:
                watch = watch or ModuleWatch(stage.modules, self._backend.device)
                graph = WholeGraph(
                    method,
                    name=f"{stage.name}.{region}",
                    backend=self._backend,
                    watch=watch,
                    policy=policy,
                    fused=allowed,
                )
                self._graphs[stage.name].append(graph)
                call = graph.call
            setattr(stage, region, self._recorded(method, call, stage.name, allowed))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure one call of a stage, device synchronised at both ends. Calls that raise do not count."""
        with wall_timer(self._device) as wall:
            yield
        self.record.stage(name).add_wall(wall.ms)

    def new_record(self) -> RunRecord:
        """Start a fresh record and return it; graphs stay."""
        self.record = RunRecord()
        self._captured_before.update({stage: self._captured_ms(stage) for stage in self._graphs})
        return self.record

    def strict_violations(self) -> list[str]:
        """What the record shows as eager or unfused though it was to be accelerated, one line each."""
        lines = []
        for stage in self.record.stages.values():
            outcomes: tuple[Outcome | SiteOutcome, ...] = (*stage.outcomes, *stage.sites)
            for outcome in outcomes:
                if outcome.reason is not None and outcome.reason not in _PLANNED:
                    lines.append(": ".join(filter(None, (stage.name, str(outcome), outcome.detail))))
        return lines

    def close(self) -> None:
        """Free all graphs and fixed inputs. Bound stages still run, and capture anew when called."""
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.close()

    def _captured_ms(self, stage: str) -> float:
        return sum(graph.capture_ms for graph in self._graphs[stage])

    def _eager(self, method: Callable[..., Any], policy: StagePolicy) -> Call:
        reason = Reason.NO_CUDA if policy.enable_cuda_graph else Reason.DISABLED
        outcome = Outcome(Kind.EAGER, reason)
        return lambda args, kwargs: (method(*args, **kwargs), outcome)

    def _recorded(
        self, method: Callable[..., Any], call: Call, stage: str, allowed: frozenset[str]
    ) -> Callable[..., Any]:
        """`call` in the form of the method, inside the stage's fusion scope."""

        def observe(outcome: SiteOutcome) -> None:
            with self._lock:
                self.record.stage(stage).sites[outcome] += 1

        @functools.wraps(method)
        def region(*args: Any, **kwargs: Any) -> Any:
            with fusion_scope(allowed, observe):
                value, outcome = call(args, kwargs)
            with self._lock:
                record = self.record.stage(stage)
                record.outcomes[outcome] += 1
                record.extra_bytes = sum(graph.extra_bytes for graph in self._graphs[stage])
                record.capture_ms = self._captured_ms(stage) - self._captured_before[stage]
            return value

        return region
