"""A small real pipeline on the CPU: two stages, regions, fusion sites, graphs on the recording backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from fake_pipeline import ACCEL
from torch import Tensor, nn

from accel.fusion import gated_residual, modulate, registry
from accel.fusion.gate import Gate
from accel.fusion.site import Kernel
from accel.policy import AccelPolicy
from accel.region import region
from pipelines.pipeline import Pipeline, PipelineDescription
from pipelines.progress import Progress
from pipelines.tensor_digest import tensor_digest
from stages.stage import Field, Stage, State

EAGER = replace(ACCEL, name="eager", enable_cuda_graph=False)
FUSED = replace(EAGER, name="fused", fused={"modulate": True, "gated_residual": True})
GRAPHS = replace(ACCEL, name="graph")
WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class ToyRequest:
    """width: rows of the sample, under the name that image models have for such a size."""

    prompt: str = "go"
    seed: int = 0
    width: int = 64


@dataclass(frozen=True)
class ToyResult:
    outputs: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def digests(self) -> dict[str, str]:
        return {name: tensor_digest(value) for name, value in self.outputs.items()}


class Encoding(Stage):
    name: ClassVar[str] = "encoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"),)
    writes: ClassVar[tuple[Field, ...]] = (Field("tokens"),)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(WIDTH, WIDTH).requires_grad_(False).eval()

    def modules(self) -> Mapping[str, nn.Module]:
        return {"net": self.net}

    def run(self, state: State) -> None:
        request = state["request"]
        noise = torch.randn(1, request.width, WIDTH, generator=torch.Generator().manual_seed(request.seed))
        state["tokens"] = self.encode(noise)

    @region
    def encode(self, noise: Tensor) -> Tensor:
        return self.net(noise)


class Denoising(Stage):
    """offset: what the region adds; it reads it past its arguments, which no region may: graphs keep it."""

    name: ClassVar[str] = "denoising"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"), Field("tokens"))
    writes: ClassVar[tuple[Field, ...]] = (Field("sample"),)

    def __init__(self, before: Before) -> None:
        self._before = before
        self.offset = 0.0

    def run(self, state: State) -> None:
        self._before(self, state["request"])
        state["sample"] = self.step(state["tokens"], torch.ones(1, 1, WIDTH))

    @region
    def step(self, tokens: Tensor, shift: Tensor) -> Tensor:
        return gated_residual(tokens, shift, modulate(tokens, shift, shift)) + self.offset


Before = Callable[[Denoising, ToyRequest], None]


class ToyPipeline(Pipeline[ToyRequest, ToyResult]):
    """before: runs ahead of every denoising. file: content of toy.bin. `with_policy` hands both on."""

    def __init__(
        self,
        policy: AccelPolicy = EAGER,
        *,
        before: Before = lambda stage, request: None,
        file: Callable[[ToyPipeline], bytes] = lambda pipeline: b"same",
    ) -> None:
        self.policy = policy
        self.file = file
        super().__init__(
            description=PipelineDescription(
                model="toy",
                size="tiny",
                size_reason="as asked",
                weights="none",
                device="cpu",
                dtype="float32",
                outputs_mean_nothing=True,
            ),
            device=torch.device("cpu"),
            policy=policy,
            stages=(Encoding(), Denoising(before)),
            remake=lambda policy: ToyPipeline(policy, before=before, file=file),
        )

    def request_from(self, config: Any) -> ToyRequest:
        return ToyRequest(prompt=config.prompt or "go", seed=config.seed or 0)

    def files(self, result: ToyResult, *, config_hash: str) -> dict[str, bytes]:
        return {"toy.bin": self.file(self)}

    def _begin(self, request: ToyRequest, progress: Progress) -> State:
        return State(request=request, progress=progress)

    def _finish(self, state: State) -> ToyResult:
        return ToyResult(self._stage_outputs(state))


def gates(**wrong: Callable[..., bool]) -> Callable[[str], Gate]:
    """A `registry.gate` whose kernels run on the CPU and are their references.

    wrong: site name -> for which arguments its kernel flips the lowest bit of the first element.
    """
    made: dict[str, Gate] = {}

    def gate(name: str) -> Gate:
        if name not in made:
            site = registry.get(name)
            run = _flipping(site.reference, wrong[name]) if name in wrong else site.reference
            made[name] = Gate(replace(site, load=lambda: Kernel(plan=lambda *_: run), devices=("cpu",)))
        return made[name]

    return gate


def many_rows(first: Tensor, *_: Any) -> bool:
    """Of the same signature as fewer rows, with which a kernel was verified."""
    return first.shape[1] > 64


def _flipping(reference: Callable[..., Tensor], when: Callable[..., bool]) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        value = reference(*args)
        if when(*args):
            value.view(torch.int32)[0, 0, 0] ^= 1
        return value

    return run
