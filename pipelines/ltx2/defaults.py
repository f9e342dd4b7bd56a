"""What a request is where the user leaves it open, by variant and size. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

DISTILLED_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875)
"""Noise levels that the distilled model was trained for (Lightricks LTX-2, `ltx_pipelines` constants)."""

REFINEMENT_SIGMAS = (0.909375, 0.725, 0.421875)
"""Noise levels of the second of two passes, from the same source; it begins at the first of them."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """See `pipelines.ltx2.settings.Ltx2Settings`, whose keys these are."""

    height: int = 512
    width: int = 768
    frames: int = 121
    steps: int = 30
    guidance: float = 3.0
    guidance_audio: float = 7.0
    stg: float = 1.0
    stg_blocks: tuple[int, ...] = (28,)
    guidance_modality: float = 3.0
    guidance_rescale: float = 0.7


def defaults(variant: str, size: Literal["tiny", "full"]) -> Defaults:
    """Released call defaults (LTX-2 spec section 3); the distilled variant is not guided.

    A tiny model makes a small clip and perturbs its last block.
    """
    base = Defaults()
    if variant == "2.0-distilled":
        base = replace(
            base,
            steps=len(DISTILLED_SIGMAS),
            guidance=1.0,
            guidance_audio=1.0,
            stg=0.0,
            guidance_modality=1.0,
            guidance_rescale=0.0,
        )
    if size == "tiny":
        base = replace(base, height=128, width=192, frames=25, stg_blocks=(1,))
    return base
