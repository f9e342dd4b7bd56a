"""Every model by name: what a user sets for it and what it is made of. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from accel.errors import ConfigError
from accel.site_names import SITE_NAMES
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.number_types import Count, NonNegative, Positive

Pixels = Annotated[int, Meta(ge=32, multiple_of=32, description="a multiple of 32, at least 32")]


@dataclass(frozen=True, kw_only=True)
class Flux2Settings:
    """The `model` node of the FLUX.2 image models.

    height, width: pixels. steps: denoising steps. guidance: scale; distilled variants ignore it.
    """

    name: Literal["flux2_klein", "flux2_dev"]
    variant: Literal["4b", "4b-base", "9b", "9b-base", "dev"]
    height: Pixels = 1024
    width: Pixels = 1024
    steps: Count
    guidance: NonNegative


@dataclass(frozen=True, kw_only=True)
class Ltx2Settings:
    """The `model` node of the LTX-2 video and audio models.

    height, width: pixels. frames: 8 n + 1. fps: frames per second. guidance, guidance_audio:
    scales of the two modalities.
    """

    name: Literal["ltx2"]
    variant: Literal["2.0", "2.0-distilled", "2.3"]
    height: Pixels = 512
    width: Pixels = 768
    frames: Count = 121
    fps: Positive = 24.0
    steps: Count = 30
    guidance: NonNegative = 3.0
    guidance_audio: NonNegative = 7.0

    def __post_init__(self) -> None:
        if self.frames % 8 != 1:
            raise ConfigError(f"model.frames: expected 8 n + 1 (9, 17, ..., 121), got {self.frames}")


@dataclass(frozen=True, kw_only=True)
class Model:
    """settings: type of the `model` node. stages: those with regions, which `accel.stages` may name.
    sites: fusion sites of its code. observes: takes an `observation`.
    loader: module whose `load` makes the pipeline; `None` where this version can't run the model.
    """

    settings: type[Any]
    stages: tuple[str, ...]
    sites: tuple[str, ...] = SITE_NAMES
    observes: bool = False
    loader: str | None = None


_FLUX2 = Model(settings=Flux2Settings, stages=("text_encoding", "denoising", "vae"))

MODELS = {
    "flux3_action": Model(
        settings=Flux3Settings,
        stages=("text_encoding", "vae", "observation_encoding", "denoising"),
        observes=True,
        loader="pipelines.flux3_action.pipeline",
    ),
    "flux2_klein": _FLUX2,
    "flux2_dev": _FLUX2,
    "ltx2": Model(
        settings=Ltx2Settings,
        stages=("text_encoding", "connectors", "denoising", "vae", "audio_vae", "vocoder"),
    ),
}


def require_available(name: str) -> None:
    """Refuse models that this version can compose but not run. Raises: ConfigError."""
    if MODELS[name].loader is None:
        running = ", ".join(known for known, model in MODELS.items() if model.loader)
        raise ConfigError(f"model={name} can't be run in this version. Models that run: {running}.")
