"""What a user sets for FLUX 3 Action. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from accel.errors import ConfigError
from pipelines.flux3_action.policy_config import Sampler

Variant = Literal["base", "fp8r", "gd", "gd-fp8r", "sd", "sd-fp8r"]

Count = Annotated[int, Meta(ge=1)]
Scale = Annotated[float, Meta(ge=0)]
Shift = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Flux3Settings:
    """The `model` node; `None` takes the policy package's own value (spec section 3).

    variant: which export of the package. steps: denoising steps. guidance: video scale;
    guidance_action: action scale; both exactly 1.0 means one pass per step. shift: timestep
    shift of the sampler. horizon: actions returned, at most the package's chunk.
    caption_cache_tokens: encoded captions kept, in tokens; 0 encodes every prompt anew.
    """

    name: Literal["flux3_action"] = "flux3_action"
    variant: Variant = "base"
    steps: Count | None = None
    guidance: Scale | None = None
    guidance_action: Scale | None = None
    sampler: Sampler | None = None
    shift: Shift | None = None
    horizon: Count | None = None
    caption_cache_tokens: Annotated[int, Meta(ge=0)] = 65536


@dataclass(frozen=True, kw_only=True)
class ObservationSource:
    """Where camera images and robot state come from: exactly one of three.

    episode: recorded episode folder, of which `frame` is used. npz: a file of arrays.
    images: camera name -> image file, together with `state` (dataset units; DROID: 7 joint
    angles in rad, then gripper closed fraction 0..1).
    layout, order, value_range: what pixel arrays mean. value_range is the values of black and
    white; `auto` is 0..255 for integers and 0..1 for floats.
    """

    episode: str | None = None
    frame: Annotated[int, Meta(ge=0)] = 0
    npz: str | None = None
    images: dict[str, str] | None = None
    state: list[float] | None = None
    layout: Literal["auto", "hwc", "chw"] = "hwc"
    order: Literal["rgb", "bgr", "rgba", "bgra"] = "rgb"
    value_range: Literal["auto"] | tuple[float, float] = "auto"

    def __post_init__(self) -> None:
        given = [name for name in ("episode", "npz", "images") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ConfigError(
                f"observation: give exactly one of episode, npz, images (found {found}). "
                "Switch the others off, e.g. observation.episode=null"
            )
        if (self.images is None) != (self.state is None):
            raise ConfigError("observation: images and state (a list of numbers) are given together.")
