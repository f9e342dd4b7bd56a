"""Every model by name: what a user sets for it and what it is made of. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from accel.site_names import SITE_NAMES
from pipelines.flux2.settings import Flux2Settings
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.ltx2.settings import Ltx2Settings

ModelSettings: TypeAlias = Flux3Settings | Flux2Settings | Ltx2Settings


@dataclass(frozen=True, kw_only=True)
class Model:
    """settings: type of the `model` node. stages: those with regions, which `accel.stages` may name.
    loops: those of them that run a loop.
    sites: fusion sites of its code. savings: those it can take. observes: takes an `observation`.
    loader: module whose `load` makes the pipeline.
    """

    settings: type[ModelSettings]
    stages: tuple[str, ...]
    loader: str
    loops: tuple[str, ...] = ("denoising",)
    sites: tuple[str, ...] = SITE_NAMES
    savings: tuple[str, ...] = ()
    observes: bool = False


_FLUX2 = Model(
    settings=Flux2Settings,
    stages=("text_encoding", "image_encoding", "denoising", "vae"),
    loader="pipelines.flux2.pipeline",
)

MODELS = {
    "flux3_action": Model(
        settings=Flux3Settings,
        stages=("text_encoding", "vae", "observation_encoding", "denoising"),
        observes=True,
        loader="pipelines.flux3_action.pipeline",
        savings=("batched_guidance", "skip_unused_guidance"),
    ),
    "flux2_klein": replace(_FLUX2, savings=("batched_guidance",)),
    "flux2_dev": _FLUX2,
    "ltx2": Model(
        settings=Ltx2Settings,
        stages=(
            "text_encoding",
            "connectors",
            "latent_preparation",
            "denoising",
            "upsampling",
            "refinement",
            "vae",
            "audio_vae",
            "vocoder",
        ),
        loader="pipelines.ltx2.pipeline",
        loops=("denoising", "refinement"),
        savings=("skip_ineffective_stg",),
    ),
}
