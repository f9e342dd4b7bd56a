"""What the runner knows of a stage that it bound."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from accel.compiled import CompiledStage
from accel.graphs.backend import GraphBackend
from accel.graphs.cache import MemoryBudget
from accel.graphs.modules import ModuleWatch
from accel.policy import StagePolicy


@dataclass(frozen=True)
class BoundStage:
    """backend, watch: `None` where the policy or the device allows no graphs. compiled: `None` without."""

    name: str
    policy: StagePolicy
    backend: GraphBackend | None
    watch: ModuleWatch | None
    compiled: CompiledStage | None

    @functools.cached_property
    def budget(self) -> MemoryBudget:
        """Shared by the graphs of the stage."""
        return MemoryBudget(self.policy.memory_budget_mb)

    @functools.cached_property
    def allowed(self) -> frozenset[str]:
        """Sites that may fuse and savings that may be taken."""
        return frozenset(name for name, on in self.policy.fused.items() if on)
