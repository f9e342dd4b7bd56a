"""What one FLUX.2 request asks for, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipelines.flux2.image_size import TOKEN_PIXELS
from pipelines.flux2.images import Reference
from pipelines.flux2.position_ids import Grid
from pipelines.request_rules import MAX_SEED, require_rules, whole
from pipelines.tensor_digest import DigestedOutputs


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """One prompt and how to sample its images.

    seed: 0..`MAX_SEED`, seeds the CPU noise generator of all images together. height, width: pixels,
    multiples of 16. steps: network evaluations, >= 1. guidance: scale >= 0. images: how many to make.
    references: images that condition the new ones.
    Raises: ConfigError for a value of another type or range.
    """

    prompt: str
    seed: int = 0
    height: int
    width: int
    steps: int
    guidance: float
    images: int = 1
    references: tuple[Reference, ...] = ()

    def __post_init__(self) -> None:
        multiple = f"a multiple of {TOKEN_PIXELS}, at least {TOKEN_PIXELS}"
        guides = isinstance(self.guidance, int | float) and math.isfinite(self.guidance)
        rules = {
            "prompt": (isinstance(self.prompt, str), "text"),
            "seed": whole(self.seed, 0, MAX_SEED),
            "height": (whole(self.height, 1)[0] and self.height % TOKEN_PIXELS == 0, multiple),
            "width": (whole(self.width, 1)[0] and self.width % TOKEN_PIXELS == 0, multiple),
            "steps": whole(self.steps, 1),
            "guidance": (guides and self.guidance >= 0, "a number >= 0"),
            "images": whole(self.images, 1),
        }
        require_rules(self, rules)

    @property
    def grid(self) -> Grid:
        """Rows and columns of tokens."""
        return self.height // TOKEN_PIXELS, self.width // TOKEN_PIXELS


@dataclass(frozen=True)
class ImageResult(DigestedOutputs):
    """Images and what they were made from.

    images: model dtype, (B, 3, H, W) in [0, 1] on the CPU. outputs: every stage output by "stage.field";
    shared, do not write. notes: what the sender should know about how the request was served.
    """

    images: Tensor
    prompt: str
    seed: int
    outputs: Mapping[str, Any]
    notes: tuple[str, ...] = ()
