"""Between the two passes of LTX-2: half-size latents -> full-size ones with new noise.

Source: diffusers 0.42, `LTX2LatentUpsamplePipeline`, and what `LTX2Pipeline` and `LTX2ImageToVideoPipeline`
make of latents that they are called with. What rounds there rounds here: upsampled latents are normalised
and mixed with noise in the model's dtype, and sound is denormalised and normalised again.

Shapes: B videos, C x F x H x W video latents of full size, T x M audio latents with Ca channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import LTX2LatentUpsamplePipeline
from torch import Tensor, nn

from accel.region import region
from pipelines.ltx2.latent_shapes import (
    Latents,
    channel_statistics,
    first_frame_mask,
    pack_video,
    unpack_video,
)
from pipelines.ltx2.request import RefinementPlan, VideoRequest
from pipelines.transfer import upload
from stages.stage import Field, Stage, State


class Upsampling(Stage):
    """Latents of the first pass -> where the second begins, with noise that follows the first's."""

    name: ClassVar[str] = "upsampling"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"), Field("generator"), Field("latents"))
    writes: ClassVar[tuple[Field, ...]] = (
        Field("refinement_start", "(B, F H W, C) and (B, T, Ca M)", "fp32 `Latents`, normalised"),
        Field("refinement_given", "(B, F H W)", "`given` at full size"),
    )

    def __init__(
        self, *, upsampler: nn.Module, vae: Any, audio_vae: Any, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._upsampler = upsampler
        self._vae = vae
        self._audio_vae = audio_vae
        self._device = device
        self._dtype = dtype
        self._upsample = LTX2LatentUpsamplePipeline(vae=vae, latent_upsampler=upsampler)

    def modules(self) -> Mapping[str, nn.Module]:
        return {"latent_upsampler": self._upsampler, "vae": self._vae, "audio_vae": self._audio_vae}

    def run(self, state: State) -> None:
        request: VideoRequest = state["request"]
        latents: Latents = state["latents"]
        assert request.refinement is not None
        shape, (videos, _, channels) = latents.shape.doubled(), latents.video.shape
        mask = None
        noise_shape: tuple[int, ...] = (videos, shape.tokens, channels)
        if request.image is not None:
            mask = first_frame_mask(shape, videos=videos, device=self._device)
            noise_shape = (videos, channels, shape.frames, shape.height, shape.width)
        generator: torch.Generator = state["generator"]
        video_noise = torch.randn(noise_shape, generator=generator, dtype=self._dtype, device="cpu")
        audio_noise = torch.randn(latents.audio.shape, generator=generator, dtype=torch.float32, device="cpu")
        state["refinement_start"] = self.upsample(
            latents,
            upload(video_noise, self._device),
            upload(audio_noise, self._device),
            mask,
            plan=request.refinement,
        )
        state["refinement_given"] = None if mask is None else pack_video(mask).squeeze(-1)

    @region
    def upsample(
        self,
        latents: Latents,
        video_noise: Tensor,
        audio_noise: Tensor,
        mask: Tensor | None,
        *,
        plan: RefinementPlan,
    ) -> Latents:
        """Latents of half the height and width -> of full size, at the noise level that `plan` begins at.

        video_noise: model dtype, tokens (B, F H W, C); with a mask (B, C, F, H, W). audio_noise: fp32
        (B, T, Ca M). mask: fp32 (B, 1, F, H, W), 1 where no noise is added.
        """
        (upsampled,) = self._upsample(
            latents=unpack_video(latents.video, latents.shape),
            latents_normalized=True,
            adain_factor=plan.adain,
            tone_map_compression_ratio=plan.tone_mapping,
            output_type="latent",
            return_dict=False,
        )
        mean, std = channel_statistics(self._vae, upsampled.dtype)
        video = (upsampled - mean) * self._vae.config.scaling_factor / std
        level = plan.sigmas[0]
        if mask is None:
            video = _noised(pack_video(video), video_noise, level)
        else:
            video = pack_video(_noised(video, video_noise, level * (1 - mask.to(video.dtype))))
        mean, std = self._audio_vae.latents_mean.float(), self._audio_vae.latents_std.float()
        audio = (latents.audio * std + mean - mean) / std
        return Latents(video.float(), _noised(audio, audio_noise, level), latents.shape.doubled())


def _noised(latents: Tensor, noise: Tensor, level: float | Tensor) -> Tensor:
    """level: 0 is without noise, 1 is noise alone."""
    return level * noise + (1 - level) * latents
