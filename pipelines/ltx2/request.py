"""What one LTX-2 request asks for, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from accel.errors import ConfigError
from pipelines.ltx2.architectures import Size
from pipelines.ltx2.defaults import DISTILLED_SIGMAS, REFINEMENT_SIGMAS, Defaults, defaults
from pipelines.ltx2.guidance import Guidance, Scales
from pipelines.ltx2.settings import Ltx2Settings, require_clip
from pipelines.number_types import MAX_BATCH, MAX_STEPS
from pipelines.prompt_tokens import require_unicode, required_prompt
from pipelines.request_rules import MAX_SEED, Rule, number, require_rules, whole
from pipelines.tensor_digest import DigestedOutputs

_LEAST_SIGMA = 1e-6  # fp32 divides by noise levels
_H264_SIDES = range(2, 16386)  # pixels; of an odd number the last one is left out


@dataclass(frozen=True, kw_only=True)
class RefinementPlan:
    """How a video that was denoised at half its height and width comes to its full size.

    sigmas: noise levels of the unguided second pass, used as they are; it begins with noise of the first.
    adain: share, 0..1, of the upsampled latents that gets the mean and deviation of the half-size ones, by
    channel. tone_mapping: how strongly large latents are compressed, 0..1. Both are off at 0.
    Raises: ConfigError for a value of another type or range.
    """

    sigmas: tuple[float, ...] = REFINEMENT_SIGMAS
    adain: float = 0.0
    tone_mapping: float = 0.0

    def __post_init__(self) -> None:
        shares = {name: number(getattr(self, name), 0, 1) for name in ("adain", "tone_mapping")}
        require_rules(self, {"sigmas": _noise_levels(self.sigmas), **shares})


@dataclass(frozen=True, kw_only=True)
class VideoRequest:
    """A prompt and how to sample its videos. Make it with `video_request`.

    height, width: pixels, as `Ltx2Settings` has them. frames: 8 n + 1. fps: frames per second, >= 1.
    sigmas: noise levels before each step, before the scheduler's time shift; at most 1, falling, the last
    between 0 and 1. refinement: of a video made in two passes; `sigmas` and `guidance` are then those of the
    first. `None`: one pass.
    videos: how many, each with noise of its own. seed: 0..`MAX_SEED`, of the CPU noise generator. image: the
    first frame, RGB of any size, or `None`. image_crf: H.264 quality that the image is passed through, as the
    model was trained; 0 leaves it as it is. notes: what was changed of what the sender gave.
    Raises: ConfigError for a value of another type or range, ObservationError for text that is not valid
        Unicode.
    """

    prompt: str
    negative_prompt: str
    height: int
    width: int
    frames: int
    fps: float
    sigmas: tuple[float, ...]
    guidance: Guidance
    videos: int
    seed: int
    image: Image.Image | None
    image_crf: int
    refinement: RefinementPlan | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules = {
            "prompt": (isinstance(self.prompt, str), "text"),
            "negative_prompt": (isinstance(self.negative_prompt, str), "text"),
            "seed": whole(self.seed, 0, MAX_SEED),
            **{name: whole(getattr(self, name), 1) for name in ("height", "width", "frames")},
            "videos": whole(self.videos, 1, MAX_BATCH),
            "fps": number(self.fps, 1),
            "sigmas": _noise_levels(self.sigmas),
            "guidance": (isinstance(self.guidance, Guidance), "a `Guidance`"),
            "image": (self.image is None or isinstance(self.image, Image.Image), "a PIL image or None"),
            "image_crf": whole(self.image_crf, 0, 51),
            "refinement": (isinstance(self.refinement, RefinementPlan | None), "a `RefinementPlan` or None"),
        }
        require_rules(self, rules)
        require_unicode(self.prompt)
        require_unicode(self.negative_prompt, name="model.negative_prompt")
        require_clip(self.height, self.width, self.frames, two_stage=self.refinement is not None)
        if self.image is not None:
            _require_first_frame(self.image, crf=self.image_crf)

    @property
    def first_size(self) -> tuple[int, int]:
        """Height and width in pixels that the first pass has: half of the video's if another follows."""
        scale = 1 if self.refinement is None else 2
        return self.height // scale, self.width // scale


def _noise_levels(sigmas: object) -> Rule:
    """A single level of 1 is none either: where the scheduler stretches, it has nothing to stretch."""
    holds = (
        isinstance(sigmas, tuple)
        and 0 < len(sigmas) <= MAX_STEPS
        and all(number(sigma, _LEAST_SIGMA, 1)[0] for sigma in sigmas)
        and all(after < before for before, after in pairwise(sigmas))
        and sigmas[-1] < 1
    )
    return (
        holds,
        f"up to {MAX_STEPS} falling noise levels, 1.0 to {_LEAST_SIGMA:g}, the last below 1.0, as a tuple",
    )


def _require_first_frame(image: Image.Image, *, crf: int) -> None:
    if image.mode != "RGB":
        raise ConfigError(f"model.image: pixels of mode {image.mode}; convert it to RGB.")
    if crf and not all(side in _H264_SIDES for side in image.size):
        raise ConfigError(
            f"model.image: {image.width}x{image.height} pixels can't be H.264, which takes "
            f"{_H264_SIDES[0]} to {_H264_SIDES[-1]} a side; use model.image_crf=0 or another image."
        )


def video_request(
    prompt: str | None,
    *,
    settings: Ltx2Settings,
    size: Size,
    seed: int | None = None,
    image: Image.Image | None = None,
    notes: tuple[str, ...] = (),
) -> VideoRequest:
    """Fill what the settings leave open with the values of their variant at this size.

    seed: `None` is 0. image: the first frame, RGB of any size; `settings.image` is not read. notes: what was
    changed of it.
    Raises: ConfigError and ObservationError for values that can't be served, naming the key.
    """
    own = defaults(settings.variant, size)
    return VideoRequest(
        prompt=required_prompt(prompt, of="video", example="waves on a beach"),
        negative_prompt=settings.negative_prompt,
        height=own.height if settings.height is None else settings.height,
        width=own.width if settings.width is None else settings.width,
        frames=own.frames if settings.frames is None else settings.frames,
        fps=settings.fps,
        sigmas=_sigmas(settings.variant, own.steps if settings.steps is None else settings.steps),
        guidance=_guidance(settings, own),
        videos=settings.videos,
        seed=0 if seed is None else seed,
        image=image,
        image_crf=settings.image_crf,
        refinement=_refinement(settings),
        notes=notes,
    )


def _refinement(settings: Ltx2Settings) -> RefinementPlan | None:
    if not settings.two_stage:
        return None
    return RefinementPlan(adain=settings.upsampling_adain, tone_mapping=settings.upsampling_tone_mapping)


def _sigmas(variant: str, steps: int) -> tuple[float, ...]:
    """Evenly spaced, or those that the distilled model was trained for."""
    if variant != "2.0-distilled":
        if steps < 2:
            raise ConfigError("model.steps=1: the schedule spans from noise to a rest of it; use 2 or more.")
        return tuple(np.linspace(1.0, 1 / steps, steps).tolist())
    if steps != len(DISTILLED_SIGMAS):
        raise ConfigError(
            f"model.steps={steps}: variant {variant} has {len(DISTILLED_SIGMAS)} steps and no other number; "
            "leave model.steps out."
        )
    return DISTILLED_SIGMAS


def _guidance(settings: Ltx2Settings, own: Defaults) -> Guidance:
    stg = own.stg if settings.stg is None else settings.stg
    stg_blocks = own.stg_blocks if settings.stg_blocks is None else settings.stg_blocks

    def scales(text: float) -> Scales:
        return Scales(
            text=text,
            stg=stg,
            modality=own.guidance_modality
            if settings.guidance_modality is None
            else settings.guidance_modality,
            rescale=own.guidance_rescale if settings.guidance_rescale is None else settings.guidance_rescale,
        )

    return Guidance(
        video=scales(own.guidance if settings.guidance is None else settings.guidance),
        audio=scales(own.guidance_audio if settings.guidance_audio is None else settings.guidance_audio),
        stg_blocks=stg_blocks if stg else (),
    )


@dataclass(frozen=True)
class VideoResult(DigestedOutputs):
    """Videos with sound and what they were made from.

    frames: (videos, frames, 3, H, W) in [0, 1], model dtype, on the CPU. waveform: (videos, 2, samples) in
    [-1, 1], model dtype, on the CPU. fps: frames per second. sampling_rate: samples per second.
    outputs: every stage output by "stage.field"; shared, do not write.
    notes: what the sender should know about how the request was served.
    """

    frames: Tensor
    waveform: Tensor
    fps: float
    sampling_rate: int
    prompt: str
    seed: int
    outputs: Mapping[str, Any]
    notes: tuple[str, ...] = ()
