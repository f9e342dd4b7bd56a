"""Times of two pipelines on the same weights, call by call in turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias

import torch

from accel.policy import AccelPolicy
from accel.record import RunRecord
from pipelines.pipeline import PipelineDescription, current_device
from stages.stage import Stage

# Wall time of one call, ms, by stage.
StageTimes: TypeAlias = Mapping[str, float]


class TimedPipeline(Protocol):
    """What measuring needs of a pipeline; see `pipelines.pipeline.Pipeline`."""

    @property
    def description(self) -> PipelineDescription: ...
    @property
    def stages(self) -> Sequence[Stage]: ...
    @property
    def record(self) -> RunRecord: ...
    def with_policy(self, policy: AccelPolicy) -> Self: ...
    def new_record(self) -> None: ...
    def run(self, request: Any) -> Any: ...
    def profile(self, request: Any) -> None: ...
    def close(self) -> None: ...


class Arm:
    """One pipeline that gets the same request again and again.

    forgets: stages that keep results between requests, and are to compute them anew in every timed call.
    """

    def __init__(self, pipeline: TimedPipeline, request: Any, *, forgets: Collection[str] = ()) -> None:
        self.forgets = forgets
        self._pipeline = pipeline
        self._request = request

    @property
    def record(self) -> RunRecord:
        """Of the last call."""
        return self._pipeline.record

    def first(self) -> Mapping[str, str]:
        """The cold call: digests of its outputs."""
        digests: Mapping[str, str] = self._pipeline.run(self._request).digests
        return digests

    def time(self) -> StageTimes:
        """One call."""
        self._forget()
        self._pipeline.new_record()
        self._pipeline.run(self._request)
        stages = self.record.stages.values()
        return {stage.name: stage.cold_ms for stage in stages if stage.cold_ms is not None}

    def profile(self) -> None:
        """One call under the profiler, for the record; none without CUDA."""
        self._forget()
        self._pipeline.profile(self._request)

    def close(self) -> None:
        self._pipeline.close()

    def _forget(self) -> None:
        with torch.inference_mode(), current_device(torch.device(self._pipeline.description.device)):
            for stage in self._pipeline.stages:
                if stage.name in self.forgets:
                    stage.forget()


def time_pair(number: int, a: Arm, b: Arm) -> tuple[StageTimes, StageTimes]:
    """A call of each, for numbers 0, 1, ... in the order A B, B A, ...: drifting clocks favour neither."""
    if number % 2 == 0:
        first = a.time()
        return first, b.time()
    second = b.time()
    return a.time(), second
