"""What the `accel` part of the configuration means, per stage.

Free of torch: configuration errors must show in well under a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from accel.errors import ConfigError
from accel.near_match import suggestion

T = TypeVar("T")

GraphMode = Literal["full", "segmented"]
OnFull = Literal["eager", "evict"]
Loop = Literal["auto", "step", "chain", "whole"]
Capture = Literal["lazy", "explicit"]
Megabytes = Annotated[int, Meta(ge=1)]
Entries = Annotated[int, Meta(ge=1, le=256)]
Segments = Annotated[int, Meta(ge=1, le=4096)]


@dataclass(frozen=True, kw_only=True)
class StagePolicy:
    """What may be done to one stage.

    enable_cuda_graph: capture the stage's regions and replay them.
    graph_mode: `full` captures a region as one graph; `segmented` may break it.
    max_entries: graphs kept per region; one graph serves one signature.
    max_segments: segments allowed in one broken graph.
    on_full: with `max_entries` graphs live, run new signatures `eager` or `evict` the
        least recently replayed graph.
    loop: how a stage's loop is captured: `step`, every step's network call alone; `chain`, a whole
        step with its state kept in place; `whole`, all steps as one graph; `auto`, the stage's own
        choice.
    capture: `lazy` captures whenever a new signature is called; `explicit` during warm-up only.
    memory_budget_mb: device memory that the stage's graphs may hold, MiB; `None` is unbounded.
    fused: site name -> allowed; see `accel.fusion.registry`.
    """

    enable_cuda_graph: bool
    graph_mode: GraphMode
    max_entries: int
    max_segments: int
    on_full: OnFull
    loop: Loop = "auto"
    capture: Capture = "lazy"
    memory_budget_mb: int | None = None
    fused: Mapping[str, bool]


@dataclass(frozen=True, kw_only=True)
class StageOverride:
    """The part of a policy that one stage sets differently; `None` inherits."""

    enable_cuda_graph: bool | None = None
    graph_mode: GraphMode | None = None
    max_entries: Entries | None = None
    max_segments: Segments | None = None
    on_full: OnFull | None = None
    loop: Loop | None = None
    capture: Capture | None = None
    memory_budget_mb: Megabytes | None = None
    fused: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AccelPolicy:
    """The resolved `accel` node. Field meanings as in `StagePolicy`.

    name: which `conf/accel/*.yaml` it came from, for reports.
    manifest: file of signatures that were used before, captured at load and written at the end.
    strict: turn every unplanned `eager` into exit code 3.
    stages: stage name -> what that stage sets differently.
    """

    name: str
    enable_cuda_graph: bool
    graph_mode: GraphMode
    max_entries: Entries
    max_segments: Segments
    on_full: OnFull
    loop: Loop = "auto"
    capture: Capture = "lazy"
    memory_budget_mb: Megabytes | None = None
    manifest: str | None = None
    strict: bool
    fused: dict[str, bool]
    stages: dict[str, StageOverride]

    def for_stage(self, stage: str) -> StagePolicy:
        """Merge the stage's own settings over the common ones."""
        own = self.stages.get(stage, StageOverride())
        return StagePolicy(
            enable_cuda_graph=_first(own.enable_cuda_graph, self.enable_cuda_graph),
            graph_mode=_first(own.graph_mode, self.graph_mode),
            max_entries=_first(own.max_entries, self.max_entries),
            max_segments=_first(own.max_segments, self.max_segments),
            on_full=_first(own.on_full, self.on_full),
            loop=_first(own.loop, self.loop),
            capture=_first(own.capture, self.capture),
            memory_budget_mb=_first(own.memory_budget_mb, self.memory_budget_mb),
            fused={**self.fused, **own.fused},
        )

    def check(self, *, stages: Sequence[str], sites: Sequence[str]) -> None:
        """Refuse names that no stage or fusion site of this pipeline carries.

        stages: those with regions; a policy has no effect on others.
        Raises: ConfigError naming the key and the nearest known name.
        """
        for stage, own in self.stages.items():
            if stage not in stages:
                raise ConfigError(
                    f"accel.stages: '{stage}' is no stage with regions{suggestion(stage, sorted(stages))}"
                )
            for site in own.fused:
                require_known(f"accel.stages.{stage}.fused", site, sites)
        for site in self.fused:
            require_known("accel.fused", site, sites)


def require_known(where: str, name: str, known: Sequence[str]) -> None:
    """Raise ConfigError unless `name` is one of `known`; suggest the nearest."""
    if name not in known:
        raise ConfigError(f"{where}: unknown name '{name}'{suggestion(name, sorted(known))}")


def _first(own: T | None, common: T) -> T:
    return common if own is None else own
