"""What a user sets for FLUX 3 Action. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from msgspec import Meta

from accel.errors import ConfigError
from pipelines.flux3_action.image_format import ImageFormat, Layout, Order, ValueRange
from pipelines.flux3_action.policy_config import Sampler
from pipelines.number_types import Count, NonNegative, Positive, Steps

Variant = Literal["base", "fp8r", "gd", "gd-fp8r", "sd", "sd-fp8r"]

# Keys that say something about one kind of source alone.
_BELONGS_TO = {"frame": "episode", "state": "images", "layout": "npz", "order": "npz", "value_range": "npz"}


@dataclass(frozen=True, kw_only=True)
class Flux3Settings:
    """The `model` node; `None` takes the policy package's own value (spec section 3).

    variant: which export of the package. steps: denoising steps, up to 1000. guidance: video scale;
    guidance_action: action scale; both exactly 1.0 means one pass per step. shift: timestep
    shift of the sampler. horizon: actions returned, at most the package's chunk.
    caption_cache_tokens: encoded captions kept, in tokens; 0 encodes every prompt anew.
    """

    name: Literal["flux3_action"] = "flux3_action"
    variant: Variant = "base"
    steps: Steps | None = None
    guidance: NonNegative | None = None
    guidance_action: NonNegative | None = None
    sampler: Sampler | None = None
    shift: Positive | None = None
    horizon: Count | None = None
    caption_cache_tokens: Annotated[int, Meta(ge=0)] = 65536


@dataclass(frozen=True, kw_only=True)
class ObservationSource:
    """Where camera images and robot state come from: exactly one of three.

    episode: recorded episode folder, of which `frame` is used. npz: a file of arrays.
    images: camera name -> image file, together with `state` (dataset units; DROID: 7 joint
    angles in rad, then gripper closed fraction 0..1).
    layout, order, value_range: what the pixel arrays of an npz mean, as in `ImageFormat`.
    Raises: ConfigError for keys that contradict each other or would have no effect.
    """

    episode: str | None = None
    frame: Annotated[int, Meta(ge=0)] = 0
    npz: str | None = None
    images: dict[str, str] | None = None
    state: list[float] | None = None
    layout: Layout = "hwc"
    order: Order = "rgb"
    value_range: ValueRange = "auto"

    def __post_init__(self) -> None:
        given = [name for name in ("episode", "npz", "images") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ConfigError(
                f"observation: give exactly one of episode, npz, images (found {found}). "
                "Switch the others off, e.g. observation.episode=null"
            )
        if self.images is not None and self.state is None:
            raise ConfigError("observation: images and state (a list of numbers) are given together.")
        for field in fields(self):
            kind = _BELONGS_TO.get(field.name, given[0])
            if kind != given[0] and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"observation.{field.name} has no meaning with observation.{given[0]}, "
                    f"only with observation.{kind}; leave it out."
                )
        self.image_format()

    def image_format(self) -> ImageFormat:
        """What pixel arrays mean. Raises: ConfigError for an impossible range."""
        return ImageFormat(layout=self.layout, order=self.order, value_range=self.value_range)
