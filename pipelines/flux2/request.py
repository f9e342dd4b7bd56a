"""What one FLUX.2 request asks for, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipelines.flux2.image_size import TOKEN_PIXELS, require_image_size
from pipelines.flux2.images import Reference
from pipelines.flux2.position_ids import Grid
from pipelines.number_types import MAX_BATCH, MAX_STEPS
from pipelines.prompt_tokens import require_unicode
from pipelines.request_rules import MAX_SEED, number, require_rules, whole
from pipelines.tensor_digest import DigestedOutputs


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """One prompt and how to sample its images.

    seed: 0..`MAX_SEED`, seeds the CPU noise generator of all images together. height, width: pixels, as
    `Flux2Settings` has them. steps: network evaluations, >= 1. guidance: scale >= 0, finite. images: how many
    to make. references: images that condition the new ones.
    Raises: ConfigError for a value of another type or range, ObservationError for text that is not valid
        Unicode.
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
        rules = {
            "prompt": (isinstance(self.prompt, str), "text"),
            "seed": whole(self.seed, 0, MAX_SEED),
            **{name: whole(getattr(self, name), 1) for name in ("height", "width")},
            "steps": whole(self.steps, 1, MAX_STEPS),
            "images": whole(self.images, 1, MAX_BATCH),
            "guidance": number(self.guidance, 0),
        }
        require_rules(self, rules)
        require_unicode(self.prompt)
        require_image_size(self.height, self.width)

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
