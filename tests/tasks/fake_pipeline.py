"""A pipeline that is not there, for tests of tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from accel.graphs.manifest import Manifest, UsedSignature
from accel.policy import AccelPolicy
from accel.record import Kind, Outcome, Reason, RunRecord
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.pipeline import PipelineDescription
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.weights_config import WeightsConfig
from tasks.config import LoggerConfig, RunConfig, RunTask

ACCEL = AccelPolicy(
    name="graph+fused",
    enable_cuda_graph=True,
    graph_mode="full",
    max_entries=8,
    max_segments=256,
    on_full="eager",
    strict=False,
    fused={},
    stages={},
)
CONFIG = RunConfig(
    model=Flux3Settings(name="flux3_action"),
    accel=ACCEL,
    task=RunTask(name="run", repeats=3),
    weights=WeightsConfig(kind="synthetic"),
    logger=LoggerConfig(kind="plain"),
    device="cpu",
)


@dataclass(frozen=True)
class FakeRequest:
    prompt: str = "go"


@dataclass
class FakeResult:
    digests: dict[str, str]
    notes: tuple[str, ...] = ("prompt cut short",)


@dataclass
class FakePipeline:
    """`before(n)` runs at the start of request n = 0, 1, ...; `digest(n)` is its output."""

    before: Callable[[int], None] = lambda n: None
    digest: Callable[[int], str] = lambda n: "same"
    violations: list[str] = field(default_factory=list)
    record: RunRecord = field(default_factory=RunRecord)
    used: list[UsedSignature] = field(default_factory=list)
    precaptured: list[Manifest] = field(default_factory=list)
    requests: int = 0
    closed: bool = False
    description = PipelineDescription(
        model="fake",
        size="tiny",
        size_reason="auto: no CUDA",
        weights="synthetic, seed 0",
        device="cpu",
        dtype="fp32",
        outputs_mean_nothing=True,
    )

    def run(self, request: FakeRequest, *, progress: Progress = NULL_PROGRESS) -> FakeResult:
        number, self.requests = self.requests, self.requests + 1
        self.before(number)
        stage = self.record.stage("denoising")
        stage.add_wall(1.0 + number)
        stage.outcomes[Outcome(Kind.EAGER, Reason.NO_CUDA)] += 1
        return FakeResult({"denoising.sample": self.digest(number), "vae.latent": "same"})

    def warm_up(self, requests: list[FakeRequest], *, progress: Progress = NULL_PROGRESS) -> list[FakeResult]:
        assert self.requests == 0
        return [self.run(request, progress=progress) for request in requests]

    def capture_manifest(self, manifest: Manifest) -> None:
        assert self.requests == 0
        self.precaptured.append(manifest)

    def used_signatures(self) -> list[UsedSignature]:
        return self.used

    def profile(self, request: FakeRequest) -> None:
        raise AssertionError("profiled without CUDA")

    def files(self, result: FakeResult, *, config_hash: str) -> dict[str, bytes]:
        return {"actions.npy": result.digests["denoising.sample"].encode()}

    def strict_violations(self) -> list[str]:
        return self.violations

    def not_worth_it(self) -> dict[str, list[str]]:
        return {"denoising": ["denoising.step saves 1 %"]}

    def close(self) -> None:
        self.closed = True


def interrupt_at(request: int) -> Callable[[int], None]:
    def before(number: int) -> None:
        if number == request:
            raise KeyboardInterrupt

    return before
