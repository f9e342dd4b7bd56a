"""A pipeline: stages in order, bound to a runner, from a request to a result."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar

import torch

from accel.graphs.manifest import Manifest, UsedSignature
from accel.measure.profile import profile_call
from accel.policy import AccelPolicy
from accel.record import RunRecord
from accel.runner import Runner
from accel.warm_up import capture_manifest, used_signatures
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

    @classmethod
    def of(
        cls, model: str, placement: Placement, *, weights: str, outputs_mean_nothing: bool
    ) -> PipelineDescription:
        """What a model that was built at `placement` is."""
        return cls(
            model=model,
            size=placement.size,
            size_reason=placement.size_reason,
            weights=weights,
            device=str(placement.device),
            dtype=str(placement.dtype).removeprefix("torch."),
            outputs_mean_nothing=outputs_mean_nothing,
        )


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device the current one, which Triton kernels need; nothing to do for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Pipeline(ABC, Generic[RequestT, ResultT]):
    """Runs requests one at a time, in any order; calls from several threads wait for each other.

    The runner replaces each region of each stage by its accelerated form; the stages' source
    stays plain. Graphs and static buffers belong to the runner.
    """

    def __init__(
        self,
        *,
        description: PipelineDescription,
        device: torch.device,
        policy: AccelPolicy,
        stages: Sequence[Stage],
        remake: Callable[[AccelPolicy], Self],
    ) -> None:
        """remake: see `with_policy`."""
        self.description = description
        self._remake = remake
        self.stages = tuple(stages)
        self._device = device
        self._policy = policy
        self._lock = threading.Lock()
        self._runner = Runner(policy, device=device)
        self._precaptured: set[str] = set()
        for stage in self.stages:
            self._runner.bind(stage)

    @property
    def record(self) -> RunRecord:
        """What happened so far, per stage."""
        return self._runner.record

    def new_record(self) -> None:
        """Start measuring afresh; captured graphs stay."""
        self._runner.new_record()

    def with_policy(self, policy: AccelPolicy) -> Self:
        """Another pipeline on the same components: weights are shared, graphs and caches are not."""
        with current_device(self._device):
            return self._remake(policy)

    def strict_violations(self) -> list[str]:
        """Region calls that ran eager although the policy planned a graph, one line each."""
        return self._runner.strict_violations()

    def not_worth_it(self) -> dict[str, list[str]]:
        """Live graphs that save less than 3 % of the eager time as measured at capture: lines by stage."""
        lines = defaultdict(list)
        for region in self._runner.regions:
            for graph in region.graph.stats().not_worth_it:
                lines[region.stage].append(
                    f"{region.stage}.{region.name} saves {100 * graph.gain:.0f} %: "
                    f"{graph.replay_ms:.2f} ms, eager {graph.eager_ms:.2f} ms"
                )
        return dict(lines)

    def run(self, request: RequestT, *, progress: Progress = NULL_PROGRESS) -> ResultT:
        """Run every stage, whatever autocast or gradient mode the caller is in.

        Device work is complete when this returns.
        """
        with self._serving():
            state = self._begin(request, progress)
            with self._runner.request():
                for stage in self.stages:
                    with self._runner.stage(stage.name):
                        stage.run(state)
            return self._finish(state)

    def warm_up(self, requests: Sequence[RequestT], *, progress: Progress = NULL_PROGRESS) -> list[ResultT]:
        """Run requests like those to come, with their true shapes, before serving; their results.

        With accel.capture=explicit nothing is captured afterwards (spec section 10).
        """
        progress.start("warm-up", len(requests))
        results = []
        for request in requests:
            results.append(self.run(request, progress=progress))
            progress.advance("warm-up")
        progress.finish("warm-up")
        self._runner.finish_warm_up()
        return results

    def capture_manifest(self, manifest: Manifest) -> None:
        """Capture the signatures that an earlier run used; see `accel.warm_up`. Starts a fresh record."""
        with self._serving():
            self._precaptured |= capture_manifest(manifest, self._runner, self._policy, device=self._device)

    def used_signatures(self) -> list[UsedSignature]:
        """The signatures that live graphs have served, for a manifest."""
        return used_signatures(self._runner, precaptured=self._precaptured)

    def profile(self, request: RequestT) -> None:
        """Run once under the profiler and record launches and GPU-busy time per stage.

        Without CUDA this does nothing.
        """
        if self._device.type != "cuda":
            return
        with self._serving():
            state = self._begin(request, NULL_PROGRESS)
            for stage in self.stages:
                activity = profile_call(partial(stage.run, state), device=self._device)
                if activity is not None:
                    record = self.record.stage(stage.name)
                    record.launches, record.gpu_busy_ms, record.host_launches = activity

    def refresh(self) -> None:
        """Forget what was computed from weights; call it after changing weights in place.

        Encoded captions and tables are computed anew. Graphs stay: they read weights by address.
        """
        with self._serving():
            for stage in self.stages:
                stage.forget()

    def close(self) -> None:
        """Free graphs and static buffers; weights stay. A later request runs, and captures anew."""
        with self._serving():
            self._runner.close()

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        """One caller at a time, on the pipeline's device, in the modes that its bits are defined for."""
        with (
            self._lock,
            current_device(self._device),
            torch.inference_mode(),
            torch.autocast("cpu", enabled=False),
            torch.autocast(self._device.type, enabled=False),
        ):
            yield

    @abstractmethod
    def request_from(self, config: Any) -> RequestT:
        """The request that a configuration describes.

        Keys that were settled when the pipeline was built (weights, model variant, size, device, dtype,
        accel) are not read again. Raises: ConfigError, ObservationError.
        """

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
