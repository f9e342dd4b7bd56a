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
from accel.record import Tier
from accel.site_names import SAVING_NAMES

T = TypeVar("T")

GraphMode = Literal["full", "segmented"]
OnFull = Literal["eager", "evict"]
Loop = Literal["auto", "step", "chain", "whole"]
Capture = Literal["lazy", "explicit"]
Compile = Literal["default", "reduce-overhead"]
CompileScope = Literal["regional", "whole"]
Megabytes = Annotated[int, Meta(ge=1)]
Entries = Annotated[int, Meta(ge=1, le=256)]
Segments = Annotated[int, Meta(ge=1, le=4096)]
Seconds = Annotated[float, Meta(gt=0)]


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
    compile: mode of `torch.compile`, whose bits may differ from eager; `None` does not compile.
    compile_scope: `regional` compiles the blocks that repeat, `whole` each region (of a loop, its body).
    fused: name of a site or saving -> allowed; see `accel.fusion.registry` and `accel.fusion.savings`.
    """

    enable_cuda_graph: bool
    graph_mode: GraphMode
    max_entries: int
    max_segments: int
    on_full: OnFull
    loop: Loop = "auto"
    capture: Capture = "lazy"
    memory_budget_mb: int | None = None
    compile: Compile | None = None
    compile_scope: CompileScope | None = None
    fused: Mapping[str, bool]

    def check(self, where: str) -> None:
        """Refuse what excludes or lacks each other. where: key of the policy. Raises: ConfigError."""
        if self.compile is None and self.compile_scope is not None:
            raise ConfigError(
                f"{where}.compile_scope={self.compile_scope} has no effect without {where}.compile. "
                "Set compile=default or compile_scope=null."
            )
        if self.compile is None:
            return
        if self.compile_scope is None:
            raise ConfigError(f"{where}.compile={self.compile} needs compile_scope=regional or whole.")
        if self.enable_cuda_graph:
            raise ConfigError(
                f"{where}: compile={self.compile} and enable_cuda_graph=true exclude each other. "
                "Use accel=compile or accel=graph."
            )
        fused = ", ".join(site for site, on in self.fused.items() if on)
        if fused:
            raise ConfigError(
                f"{where}: compile={self.compile} and fused kernels ({fused}) exclude each other. "
                "Use accel=compile or accel=fused."
            )


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
    compile: Compile | None = None
    compile_scope: CompileScope | None = None
    fused: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AccelPolicy:
    """The resolved `accel` node. Field meanings as in `StagePolicy`.

    name: which `conf/accel/*.yaml` it came from, for reports.
    auto_seconds: time to measure and choose what each stage gains from, before the first request; after it
        nothing further begins. `None` chooses nothing.
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
    compile: Compile | None = None
    compile_scope: CompileScope | None = None
    auto_seconds: Seconds | None = None
    manifest: str | None = None
    strict: bool
    fused: dict[str, bool]
    stages: dict[str, StageOverride]

    @property
    def tier(self) -> Tier:
        """What results may be, as far as the configuration says."""
        if self.compile is not None or any(own.compile for own in self.stages.values()):
            return "compiled"
        return "moved_rounding" if self._savings else "exact"

    @property
    def _savings(self) -> dict[str, str]:
        """Savings that some stage may take -> the key that allows it."""
        keys = {"accel.fused": self.fused} | {
            f"accel.stages.{stage}.fused": own.fused for stage, own in self.stages.items()
        }
        return {
            name: f"{key}.{name}" for key, fused in keys.items() for name in SAVING_NAMES if fused.get(name)
        }

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
            compile=_first(own.compile, self.compile),
            compile_scope=_first(own.compile_scope, self.compile_scope),
            fused={**self.fused, **own.fused},
        )

    def check(
        self,
        *,
        stages: Sequence[str],
        sites: Sequence[str],
        savings: Sequence[str] = SAVING_NAMES,
        loops: Sequence[str] | None = None,
    ) -> None:
        """Refuse names that no stage or fusion site of this pipeline carries, and what excludes each other.

        stages: those with regions; a policy has no effect on others. savings: those that this pipeline has;
        no other one may be on. loops: stages that run a loop; by default all of them.
        Raises: ConfigError naming the key, and the nearest known name.
        """
        names = (*sites, *SAVING_NAMES)
        for stage, own in self.stages.items():
            if stage not in stages:
                raise ConfigError(
                    f"accel.stages: '{stage}' is no stage with regions{suggestion(stage, sorted(stages))}"
                )
            if loops is not None and stage not in loops and own.loop not in (None, "auto"):
                raise ConfigError(
                    f"accel.stages.{stage}.loop={own.loop} has no effect: '{stage}' runs no loop. "
                    f"Stages that do: {', '.join(loops)}."
                )
            for site in own.fused:
                require_known(f"accel.stages.{stage}.fused", site, names)
        for site in self.fused:
            require_known("accel.fused", site, names)
        for name, key in self._savings.items():
            if name not in savings:
                has = f"it has {', '.join(savings)}" if savings else "it has none"
                raise ConfigError(f"{key}=true has no effect: this model has no such saving; {has}.")
        for stage in stages:
            key = f"accel.stages.{stage}" if stage in self.stages else "accel"
            self.for_stage(stage).check(key)
        if self.auto_seconds is not None and self.tier != "exact":
            others = (
                "compile=null" if self.tier == "compiled" else f"{next(iter(self._savings.values()))}=false"
            )
            raise ConfigError(
                f"accel.auto_seconds: stages are not chosen for beside {self.tier} ones. Set {others} or "
                "auto_seconds=null."
            )


def require_known(where: str, name: str, known: Sequence[str]) -> None:
    """Raise ConfigError unless `name` is one of `known`; suggest the nearest."""
    if name not in known:
        raise ConfigError(f"{where}: unknown name '{name}'{suggestion(name, sorted(known))}")


def _first(own: T | None, common: T) -> T:
    return common if own is None else own
