"""A pipeline whose requests are timed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.arms import Arm


@dataclass
class TimedArm:
    """A pipeline, the times of its requests, and what the first and the last of them gave.

    cold_ms: of the first request, captures and kernel verification included. walls_ms: of the timed
    requests, and of their stages by name. outputs: of the last request, by "stage.field"; empty before it.
    """

    name: str
    pipeline: Arm
    cold_ms: float | None = None
    walls_ms: list[float] = field(default_factory=list)
    stage_walls_ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    digests: list[Mapping[str, str]] = field(default_factory=list)
    outputs: Mapping[str, Any] = field(default_factory=dict)

    def start(self, request: Any) -> None:
        """The cold request."""
        begin = time.perf_counter()
        (result,) = self.pipeline.warm_up([request])
        self.cold_ms = (time.perf_counter() - begin) * 1e3
        self.digests.append(result.digests)

    def time(self, request: Any) -> None:
        """One timed request."""
        begin = time.perf_counter()
        self.pipeline.run(request)
        self.walls_ms.append((time.perf_counter() - begin) * 1e3)
        for name, stage in self.pipeline.record.stages.items():
            self.stage_walls_ms[name] += stage.walls_ms[-1:]

    def finish(self, request: Any) -> None:
        """Requests that are not timed: one whose outputs are compared, one under the profiler."""
        result = self.pipeline.run(request)
        self.digests.append(result.digests)
        self.outputs = result.outputs
        self.pipeline.profile(request)
