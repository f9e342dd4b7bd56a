"""A pipeline of two small stages, and one of the same stages whose times are told by a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel.loops import iterate
from accel.policy import AccelPolicy, StagePolicy
from accel.record import Kind, Outcome, Reason, RunRecord, SiteOutcome
from accel.region import loop_body, region
from pipelines.pipeline import PipelineDescription
from stages.stage import Field, Stage, State

CAPTURED = Outcome(Kind.CAPTURED)
DESCRIPTION = PipelineDescription(
    model="toy", size="tiny", size_reason="as asked", weights="none", device="cpu", dtype="float32",
    outputs_mean_nothing=True,
)  # fmt: skip


def policy(**changes: Any) -> AccelPolicy:
    settings: dict[str, Any] = dict(
        name="auto", enable_cuda_graph=True, graph_mode="full", max_entries=4, max_segments=8,
        on_full="eager", auto_seconds=1e9, strict=False, fused={"swiglu": True}, stages={},
    )  # fmt: skip
    return AccelPolicy(**settings | changes)


class Vae(Stage):
    name: ClassVar[str] = "vae"
    reads: ClassVar[tuple[Field, ...]] = ()
    writes: ClassVar[tuple[Field, ...]] = (Field("latent"),)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4, bias=False).requires_grad_(False).eval()
        self.kept: Tensor | None = None

    def modules(self) -> Mapping[str, nn.Module]:
        return {"net": self.net}

    def run(self, state: State) -> None:
        if self.kept is None:
            self.kept = self.encode(torch.linspace(0, 1, 8).view(2, 4))
        state["latent"] = self.kept

    def forget(self) -> None:
        self.kept = None

    @region
    def encode(self, x: Tensor) -> Tensor:
        return self.net(x)


class Denoising(Stage):
    name: ClassVar[str] = "denoising"
    reads: ClassVar[tuple[Field, ...]] = (Field("latent"),)
    writes: ClassVar[tuple[Field, ...]] = (Field("sample"),)

    def run(self, state: State) -> None:
        state["sample"] = iterate(self.advance, state["latent"], torch.ones(3).unbind(), None)

    @loop_body("whole")
    def advance(self, carry: Tensor, step: Tensor, shared: None) -> Tensor:
        return torch.tanh(carry) * step


class Output(Stage):
    name: ClassVar[str] = "output"
    reads: ClassVar[tuple[Field, ...]] = (Field("sample"),)
    writes: ClassVar[tuple[Field, ...]] = ()

    def run(self, state: State) -> None:
        pass


# Scripted times


def ideal(name: str, own: StagePolicy) -> float:
    """Milliseconds: graphs help denoising, most as one, and hurt the vae; fused kernels help both a bit."""
    fused = 0.9 if any(own.fused.values()) else 1.0
    if not own.enable_cuda_graph:
        return 100 * fused
    if name == "vae":
        return 110 * fused
    return {"step": 80, "chain": 60, "whole": 50, "auto": 50}[own.loop] * fused


@dataclass
class World:
    """What scripted pipelines share. ms: time of a stage, by name and policy. now: seconds.

    runs, profiled: the policy of every request. keeps: stages that call no region until they forget. idle:
    stages that never do.
    """

    ms: Callable[[str, StagePolicy], float] = ideal
    fails: Callable[[AccelPolicy], Exception | None] = lambda policy: None
    digest: Callable[[AccelPolicy], str] = lambda policy: "same"
    first_outcome: Outcome = CAPTURED
    fuses: bool = True
    keeps: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    now: float = 0.0
    runs: list[AccelPolicy] = field(default_factory=list)
    profiled: list[AccelPolicy] = field(default_factory=list)
    live: int = 0
    most_live: int = 0

    def pipeline(self, policy: AccelPolicy) -> Scripted:
        return Scripted(self, policy)


class Scripted:
    """A pipeline that only counts and tells times."""

    description = DESCRIPTION

    def __init__(self, world: World, policy: AccelPolicy) -> None:
        self.record = RunRecord()
        self.stages = (Vae(), Denoising(), Output())
        self._world = world
        self._policy = policy
        self._knows: set[str] = set()
        for stage in self.stages:
            stage.forget = partial(self._knows.discard, stage.name)  # type: ignore[method-assign]

    def with_policy(self, policy: AccelPolicy) -> Scripted:
        self._world.live += 1
        self._world.most_live = max(self._world.most_live, self._world.live)
        return Scripted(self._world, policy)

    def close(self) -> None:
        self._world.live -= 1

    def new_record(self) -> None:
        self.record = RunRecord()

    def profile(self, request: str) -> None:
        self._world.profiled.append(self._policy)
        for stage in self.stages:
            self.record.stage(stage.name).launches = 7

    def run(self, request: str) -> SimpleNamespace:
        world = self._world
        error = world.fails(self._policy)
        if error is not None:
            raise error
        world.runs.append(self._policy)
        for stage in self.stages:
            name, record, own = stage.name, self.record.stage(stage.name), self._policy.for_stage(stage.name)
            ms = 0.001 if name == "output" else world.ms(name, own)
            if name not in self._knows | world.idle:
                graphs = own.enable_cuda_graph
                record.outcomes[world.first_outcome if graphs else Outcome(Kind.EAGER, Reason.DISABLED)] += 1
                if any(own.fused.values()):
                    record.sites[SiteOutcome("swiglu", fused=world.fuses)] += 1
                if graphs:
                    record.extra_bytes, record.copied_in = 3 << 20, 512
            else:
                ms = 0.001
            if name in world.keeps:
                self._knows.add(name)
            record.add_wall(ms)
            world.now += ms / 1e3
        return SimpleNamespace(digests={"output.x": world.digest(self._policy)})
