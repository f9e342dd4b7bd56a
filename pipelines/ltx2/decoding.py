"""What comes after denoising: latents -> frames, and latents -> spectrogram -> sound.

Shapes: B videos, C x F x H x W video latents, T x M audio latents with Ca channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel.fusion.mounting import Mount, mount
from accel.region import region
from pipelines.ltx2.fused_resnets import VAE_FORWARDS
from pipelines.ltx2.latent_shapes import Latents, LatentShape, channel_statistics, unpack_audio, unpack_video
from stages.stage import Field, Stage, State

_LATENTS = (Field("latents"), Field("refined_latents", unit="instead, where the pipeline refines"))


def _final_latents(state: State) -> Latents:
    latents: Latents = state["refined_latents" if "refined_latents" in state else "latents"]
    return latents


class Vae(Stage):
    """Video latents -> frames."""

    name: ClassVar[str] = "vae"
    reads: ClassVar[tuple[Field, ...]] = _LATENTS
    writes: ClassVar[tuple[Field, ...]] = (
        Field("frames", "(B, frames, 3, height, width)", "model dtype, [0, 1]"),
    )

    def __init__(self, *, vae: Any, dtype: torch.dtype) -> None:
        self._vae = vae
        self._dtype = dtype

    def modules(self) -> Mapping[str, nn.Module]:
        return {"vae": self._vae}

    def mounts(self, allowed: frozenset[str]) -> Sequence[Mount]:
        return mount(self._vae.decoder, VAE_FORWARDS, allowed=allowed)

    def run(self, state: State) -> None:
        latents = _final_latents(state)
        state["frames"] = self.decode(latents.video, shape=latents.shape)

    @region
    def decode(self, tokens: Tensor, *, shape: LatentShape) -> Tensor:
        """Normalised fp32 tokens (B, F H W, C) -> (B, frames, 3, height, width)."""
        latents = unpack_video(tokens, shape).to(self._dtype)
        mean, std = channel_statistics(self._vae, self._dtype)
        latents = latents * std / self._vae.config.scaling_factor + mean
        video = self._vae.decode(latents, None, return_dict=False)[0]
        frames: Tensor = (video * 0.5 + 0.5).clamp(0, 1).transpose(1, 2)
        return frames


class AudioVae(Stage):
    """Audio latents -> mel spectrogram."""

    name: ClassVar[str] = "audio_vae"
    reads: ClassVar[tuple[Field, ...]] = _LATENTS
    writes: ClassVar[tuple[Field, ...]] = (
        Field("spectrogram", "(B, 2, 4 T - 3, mel bins)", "log mel, model dtype"),
    )

    def __init__(self, *, audio_vae: Any, dtype: torch.dtype) -> None:
        self._audio_vae = audio_vae
        self._dtype = dtype

    def modules(self) -> Mapping[str, nn.Module]:
        return {"audio_vae": self._audio_vae}

    def run(self, state: State) -> None:
        state["spectrogram"] = self.decode(_final_latents(state).audio)

    @region
    def decode(self, tokens: Tensor) -> Tensor:
        """Normalised fp32 tokens (B, T, Ca M) -> spectrogram."""
        vae = self._audio_vae
        tokens = tokens * vae.latents_std.float() + vae.latents_mean.float()
        latents = unpack_audio(tokens, mel_bins=vae.config.mel_bins // vae.mel_compression_ratio)
        spectrogram: Tensor = vae.decode(latents.to(self._dtype), return_dict=False)[0]
        return spectrogram


class Vocoder(Stage):
    """Mel spectrogram -> sound."""

    name: ClassVar[str] = "vocoder"
    reads: ClassVar[tuple[Field, ...]] = (Field("spectrogram"),)
    writes: ClassVar[tuple[Field, ...]] = (Field("waveform", "(B, 2, samples)", "model dtype, [-1, 1]"),)

    def __init__(self, *, vocoder: nn.Module) -> None:
        self._vocoder = vocoder

    def modules(self) -> Mapping[str, nn.Module]:
        return {"vocoder": self._vocoder}

    def run(self, state: State) -> None:
        state["waveform"] = self.synthesise(state["spectrogram"])

    @region
    def synthesise(self, spectrogram: Tensor) -> Tensor:
        """-> (B, 2, samples) at the vocoder's sampling rate."""
        waveform: Tensor = self._vocoder(spectrogram)
        return waveform
