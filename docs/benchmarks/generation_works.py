"""The requests that `generation.py` measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tasks.arms import Arm
from tasks.config import compose

# In this order: compiling and proving kernels falls to the arm that users get, and what `torch.compile`
# leaves in the process comes after everything else.
FLUX2_ARMS = ("graph+fused", "fused", "graph", "compile")
FLUX2_BASE_ARMS = ("graph+fused", "fused", "graph", "graph+fused, batched_guidance", "compile")
LTX2_ARMS = ("graph+fused", "fused", "graph", "segmented", "graph+fused, skip_ineffective_stg", "compile")
PROMPT = "A lighthouse on a cliff at dusk, waves breaking below, take {number}"


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of request and the arms that serve it beside eager.

    model, request: overrides that decide the components, and what is asked of them. note: how the request
    departs from the usual one, and all that options decide of it. rounds: timed requests of each arm.
    profiled_steps: of the request under the profiler, where that is a shorter one.
    """

    model: tuple[str, ...]
    request: tuple[str, ...]
    arms: tuple[str, ...]
    rounds: int
    note: str = ""
    profiled_steps: int | None = None

    def requests(self, pipeline: Arm, *place: str) -> list[Any]:
        """The timed ones, each with a prompt and a seed of its own. place: overrides of size and device."""
        config = compose(*self.model, *self.request, *place)
        return [
            pipeline.request_from(replace(config, prompt=PROMPT.format(number=number), seed=number))
            for number in range(self.rounds)
        ]

    def profiled(self, pipeline: Arm, *place: str) -> Any:
        """The request under the profiler."""
        shorter = () if self.profiled_steps is None else (f"model.steps={self.profiled_steps}",)
        return replace(self, request=(*self.request, *shorter)).requests(pipeline, *place)[0]


def works(*, size: str, ltx_steps: int) -> dict[str, Work]:
    """By name; those with the same components are neighbours.

    size: `tiny` keeps the names and asks for the smallest images and clips. ltx_steps: denoising steps of
    LTX-2, 2 or more.
    """
    klein = ("model=flux2_klein", "model.variant=4b")
    base = ("model=flux2_klein", "model.variant=4b-base")
    ltx2 = ("model=ltx2", "model.save_as=frames")
    steps = f"model.steps={ltx_steps}"
    cut = f"{ltx_steps} denoising steps of the usual 30, all alike"
    full = {
        "FLUX.2 klein 4B, 512x512, 4 steps": Work(
            model=klein,
            request=("model.height=512", "model.width=512"),
            arms=FLUX2_ARMS,
            rounds=10,
        ),
        "FLUX.2 klein 4B, 1024x1024, 4 steps": Work(
            model=klein,
            request=("model.height=1024", "model.width=1024"),
            arms=FLUX2_ARMS,
            rounds=8,
        ),
        "LTX-2.0, small": Work(
            model=ltx2,
            request=("model.height=256", "model.width=384", "model.frames=25", steps),
            arms=LTX2_ARMS,
            rounds=3,
            note=f"25 frames 384x256, {cut}",
        ),
        "LTX-2.0, 121 frames 768x512": Work(
            model=ltx2,
            request=("model.height=512", "model.width=768", "model.frames=121", steps),
            arms=LTX2_ARMS,
            rounds=2,
            note=cut,
        ),
    }
    for side in 512, 1024:
        full[f"FLUX.2 klein base 4B, {side}x{side}, 50 steps, guidance"] = Work(
            model=base,
            request=(f"model.height={side}", f"model.width={side}", "model.steps=50", "model.guidance=4.0"),
            arms=FLUX2_BASE_ARMS,
            rounds=2,
            note="launches and GPU-busy time are those of 4 steps",
            profiled_steps=4,
        )
    return full if size == "full" else {name: _tiny(work) for name, work in full.items()}


def _tiny(work: Work) -> Work:
    """Two small requests of two steps; of overrides that say the same key, the last one holds."""
    frames = ("model.frames=9",) if "model=ltx2" in work.model else ()
    small = ("model.height=64", "model.width=64", "model.steps=2", *frames)
    return replace(work, request=(*work.request, *small), rounds=2)
