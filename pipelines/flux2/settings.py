"""What a user sets for FLUX.2. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from accel.errors import ConfigError
from pipelines.flux2.image_size import require_image_size
from pipelines.number_types import Batch, Count, NonNegative, Steps

Variant = Literal["4b", "4b-base", "9b", "9b-base", "dev"]


@dataclass(frozen=True, kw_only=True)
class Flux2Settings:
    """The `model` node of the FLUX.2 image models; `None` takes the variant's own value.

    height, width: pixels, multiples of 16 up to 8192. steps: denoising steps, up to 1000; 4, of base
    variants and `dev` 50. guidance: scale; distilled variants ignore it, `dev` takes it as an input, the
    others run a second pass above 1; 1.0, of base variants and `dev` 4.0. images: files that condition the
    new image. images_per_prompt: how many to make at once, up to 64. prompt_cache_tokens: encoded prompts
    kept, in tokens, 512 each; 0 encodes every prompt anew.
    Raises: ConfigError for a variant of the other model, and for sizes that the model can't make, with the
    nearest that it can.
    """

    name: Literal["flux2_klein", "flux2_dev"]
    variant: Variant
    height: Count = 1024
    width: Count = 1024
    steps: Steps | None = None
    guidance: NonNegative | None = None
    images: tuple[str, ...] = ()
    images_per_prompt: Batch = 1
    prompt_cache_tokens: Annotated[int, Meta(ge=0)] = 16384

    def __post_init__(self) -> None:
        require_image_size(self.height, self.width)
        if (self.variant == "dev") != (self.name == "flux2_dev"):
            raise ConfigError(
                f"model.variant={self.variant} does not belong to model={self.name}; "
                "flux2_klein has 4b, 4b-base, 9b and 9b-base, flux2_dev has dev."
            )
