"""The second of two passes: a few steps at full size from upsampled latents."""

from __future__ import annotations

from typing import ClassVar

from pipelines.ltx2.denoising import Denoising
from pipelines.ltx2.guidance import UNGUIDED
from pipelines.ltx2.request import VideoRequest
from stages.stage import Field, State


class Refinement(Denoising):
    """Upsampled latents with new noise -> latents of both modalities, without guidance.

    A given first frame is the upsampled one, as in `LTX2ImageToVideoPipeline`.
    """

    name: ClassVar[str] = "refinement"
    reads: ClassVar[tuple[Field, ...]] = (
        Field("request"),
        Field("refinement_text"),
        Field("refinement_start"),
        Field("refinement_given"),
        Field("progress"),
    )
    writes: ClassVar[tuple[Field, ...]] = (
        Field("refined_latents", "(B, V, C) and (B, A, Ca M)", "fp32 `Latents`, normalised"),
    )

    def run(self, state: State) -> None:
        request: VideoRequest = state["request"]
        assert request.refinement is not None
        state["refined_latents"] = self.denoised(
            state["refinement_start"],
            request,
            text=state["refinement_text"],
            given=state["refinement_given"],
            sigmas=request.refinement.sigmas,
            guidance=UNGUIDED,
            progress=state["progress"],
        )
