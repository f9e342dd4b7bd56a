"""What a user sets for LTX-2. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from accel.errors import ConfigError
from pipelines.grids import require_grid
from pipelines.number_types import Batch, Count, NonNegative, Steps

Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=1)]  # sound grows with the seconds
Variant = Literal["2.0", "2.0-distilled", "2.3"]
SaveAs = Literal["mp4", "frames", "both"]


@dataclass(frozen=True, kw_only=True)
class Ltx2Settings:
    """The `model` node of the LTX-2 video and audio models; `None` takes the variant's own value.

    height, width: pixels, multiples of 32, at least 64. frames: 8 n + 1. fps: frames per second, >= 1.
    steps: denoising steps, 2 to 1000.
    two_stage: denoise at half the height and width, upsample the latents, and refine them at full size in
    three unguided steps; sizes are then multiples of 64, at least 128. The released recipe puts a
    distilled LoRA on 2.0 and 2.3 for these steps, which this version does not do: their own weights, made
    for more steps and guidance, refine less well. 2.0-distilled needs none.
    upsampling_adain, upsampling_tone_mapping: share, 0..1, of the upsampled latents that gets mean and
    deviation of the half-size ones, and how strongly large ones are compressed; 0.0 is off.
    guidance, guidance_audio: scales against `negative_prompt`, by modality; at 1.0 they are off, and below
    too, but a scale below 1.0 is refused beside one above.
    stg: scale of spatio-temporal guidance by the transformer's blocks `stg_blocks`; 0.0 is off.
    guidance_modality: scale against each modality alone; up to 1.0 it is off. guidance_rescale: share of
    the result that gets the contrast of the unguided one back.
    image: file of the first frame. image_crf: H.264 quality that it is passed through; 0: as it is.
    videos: how many, of one prompt, up to 64. save_as: `mp4` with sound, `frames` as PNG with a WAV, or both.
    attention_breaks: with accel=segmented, run attention eagerly between two segments. Each of a step's
    passes is then a graph of its own, of 289 segments, whatever `accel.loop`.
    prompt_cache_tokens: encoded prompts kept, in tokens; 0 encodes every prompt anew.
    Raises: ConfigError for sizes that the model can't make, with the nearest that it can.
    """

    name: Literal["ltx2"] = "ltx2"
    variant: Variant = "2.0"
    height: Count | None = None
    width: Count | None = None
    frames: Count | None = None
    fps: Rate = 24.0
    steps: Steps | None = None
    two_stage: bool = False
    upsampling_adain: Share = 0.0
    upsampling_tone_mapping: Share = 0.0
    guidance: NonNegative | None = None
    guidance_audio: NonNegative | None = None
    stg: NonNegative | None = None
    stg_blocks: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    guidance_modality: NonNegative | None = None
    guidance_rescale: Share | None = None
    negative_prompt: str = ""
    image: str | None = None
    image_crf: Annotated[int, Meta(ge=0, le=51)] = 33
    videos: Batch = 1
    save_as: SaveAs = "mp4"
    attention_breaks: bool = False
    prompt_cache_tokens: Annotated[int, Meta(ge=0)] = 4096

    def __post_init__(self) -> None:
        require_clip(self.height, self.width, self.frames, two_stage=self.two_stage)
        for name in ("upsampling_adain", "upsampling_tone_mapping"):
            if getattr(self, name) and not self.two_stage:
                raise ConfigError(f"model.{name}: has no effect in one stage; use model.two_stage=true.")


def require_clip(height: int | None, width: int | None, frames: int | None, *, two_stage: bool) -> None:
    """Refuse what can't be made; `None` is not set. Raises: ConfigError with the nearest that can."""
    step, first = (64, 128) if two_stage else (32, 64)
    legal = f"a multiple of {step}, at least {first}" + " with model.two_stage" * two_stage
    require_grid("height", height, step=step, first=first, last=8192, legal=legal)
    require_grid("width", width, step=step, first=first, last=8192, legal=legal)
    require_grid("frames", frames, step=8, first=1, last=4097, legal="8 n + 1")
