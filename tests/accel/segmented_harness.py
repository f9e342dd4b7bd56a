"""A function behind a WholeGraph that records in segments, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel.graphs.breaks import Break
from accel.graphs.modules import ModuleWatch
from accel.graphs.program import SegmentedGraph
from accel.graphs.recording import RecordingBackend
from accel.graphs.segmented import SegmentedRecorder
from accel.graphs.whole import WholeGraph
from accel.policy import StagePolicy
from accel.record import Kind, Reason


def record(
    fn: Callable[[], Any], *, backend: RecordingBackend | None = None, max_segments: int = 512
) -> SegmentedGraph:
    """What a segmented recorder makes of `fn`."""
    backend = backend or RecordingBackend()
    with backend.warm_stream():
        return SegmentedRecorder(backend, max_segments=max_segments, name="toy.f")(fn, backend.new_pool())


class Segmented:
    """A function behind a WholeGraph; calling it keeps outcomes and the graphs that were recorded."""

    def __init__(
        self, fn: Callable[..., Any], *, backend: RecordingBackend | None = None, max_segments: int = 512
    ) -> None:
        self.backend = backend or RecordingBackend()
        self.graphs: list[SegmentedGraph] = []
        recorder = SegmentedRecorder(self.backend, max_segments=max_segments, name="toy.f")

        def keep(fn: Callable[[], Any], pool: Any) -> SegmentedGraph:
            self.graphs.append(recorder(fn, pool))
            return self.graphs[-1]

        policy = StagePolicy(
            enable_cuda_graph=True, graph_mode="segmented", max_entries=4, max_segments=max_segments,
            on_full="eager", fused={},
        )  # fmt: skip
        self.graph = WholeGraph(
            fn,
            name="toy.f",
            backend=self.backend,
            watch=ModuleWatch(dict, torch.device("cpu")),
            policy=policy,
            fused=frozenset(),
            record=keep,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value, self.outcome = self.graph.call(args, kwargs)
        return value

    @property
    def kind(self) -> Kind:
        return self.outcome.kind

    @property
    def reason(self) -> Reason | None:
        return self.outcome.reason

    @property
    def breaks(self) -> tuple[Break, ...]:
        return self.graphs[-1].breaks
