"""A pipeline: stages in order, bound to a runner, from a request to a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch

from accel.measure.profile import profile_call
from accel.policy import AccelPolicy
from accel.record import RunRecord
from accel.runner import Runner
from pipelines.progress import NULL_PROGRESS, Progress
from stages.stage import Stage, State

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and how large a pipeline is built. size_reason: why `size=auto` became what it is."""

    device: torch.device
    dtype: torch.dtype
    size: Literal["tiny", "full"]
    size_reason: str


@dataclass(frozen=True, kw_only=True)
class PipelineDescription:
    """What the run header says.

    size_reason: why `size=auto` became what it is. outputs_mean_nothing: synthetic weights.
    """

    model: str
    size: str
    size_reason: str
    weights: str
    device: str
    dtype: str
    outputs_mean_nothing: bool


class Pipeline(ABC, Generic[RequestT, ResultT]):
    """Runs requests one at a time. Requests may follow each other in any order.

    The runner replaces each region of each stage by its accelerated form; the stages' source
    stays plain. Graphs and static buffers belong to the runner and die with `close`.
    """

    def __init__(
        self,
        *,
        description: PipelineDescription,
        device: torch.device,
        policy: AccelPolicy,
        stages: Sequence[Stage],
    ) -> None:
        self.description = description
        self.stages = tuple(stages)
        self._device = device
        self._runner = Runner(policy, device=device)
        for stage in self.stages:
            self._runner.bind(stage)

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    @property
    def record(self) -> RunRecord:
        """What happened so far, per stage."""
        return self._runner.record

    def new_record(self) -> RunRecord:
        """Start measuring afresh; captured graphs stay."""
        return self._runner.new_record()

    def strict_violations(self) -> list[str]:
        """Region calls that ran eager although the policy planned a graph, one line each."""
        return self._runner.strict_violations()

    @torch.inference_mode()
    def run(self, request: RequestT, *, progress: Progress = NULL_PROGRESS) -> ResultT:
        """Run every stage. Device work is complete when this returns."""
        state = self._begin(request, progress)
        for stage in self.stages:
            with self._runner.stage(stage.name):
                stage.run(state)
        return self._finish(state)

    @torch.inference_mode()
    def profile(self, request: RequestT) -> None:
        """Run once under the profiler and record launches and GPU-busy time per stage.

        Without CUDA this does nothing.
        """
        if self._device.type != "cuda":
            return
        state = self._begin(request, NULL_PROGRESS)
        for stage in self.stages:
            activity = profile_call(partial(stage.run, state), device=self._device)
            if activity is not None:
                record = self.record.stage(stage.name)
                record.launches, record.gpu_busy_ms = activity

    def close(self) -> None:
        """Free graphs and static buffers. The pipeline can't run afterwards."""
        self._runner.close()

    @abstractmethod
    def request_from(self, config: Any) -> RequestT:
        """The request that a configuration describes. Raises: ConfigError, ObservationError."""

    @abstractmethod
    def files(self, result: ResultT, *, config_hash: str) -> dict[str, bytes]:
        """File name -> content of everything a user wants to keep of a result."""

    @abstractmethod
    def _begin(self, request: RequestT, progress: Progress) -> State:
        """The state that the first stage finds."""

    @abstractmethod
    def _finish(self, state: State) -> ResultT:
        """Pick the result out of the final state."""

    def _stage_outputs(self, state: State) -> dict[str, Any]:
        """Every declared output of every stage, by "stage.field"."""
        return {
            f"{stage.name}.{field.name}": state[field.name] for stage in self.stages for field in stage.writes
        }
