"""LTX-2's latents: their shapes, and how they become tokens.

Tokens keep the memory layout that diffusers' pipelines give them, since matrix products of other layouts
may round differently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accel.errors import ConfigError


@dataclass(frozen=True)
class LatentShape:
    """frames, height, width of the video latents; audio_frames of the audio latents."""

    frames: int
    height: int
    width: int
    audio_frames: int

    @property
    def tokens(self) -> int:
        """Of the video."""
        return self.frames * self.height * self.width

    def doubled(self) -> LatentShape:
        """Twice the height and width."""
        return replace(self, height=2 * self.height, width=2 * self.width)


@dataclass(frozen=True)
class Latents:
    """Both modalities between two steps, fp32 tokens.

    video: (B, F H W, C). audio: (B, T, Ca M). shape: F, H, W and T.
    """

    video: Tensor
    audio: Tensor
    shape: LatentShape


def latent_shape(
    vae: Any, audio_vae: Any, *, frames: int, height: int, width: int, fps: float
) -> LatentShape:
    """Latents of a clip of `frames` frames of `height` x `width` pixels at `fps` frames a second.

    Raises: ConfigError for a clip that is too short for a latent of sound.
    """
    config = audio_vae.config
    audio_fps = config.sample_rate / config.mel_hop_length / float(audio_vae.temporal_compression_ratio)
    audio_frames = round(frames / fps * audio_fps)
    if audio_frames < 1:
        raise ConfigError(
            f"model.fps={fps:g}: {frames} frames are too short for sound; "
            "use fewer frames a second or more frames."
        )
    return LatentShape(
        frames=(frames - 1) // vae.temporal_compression_ratio + 1,
        height=height // vae.spatial_compression_ratio,
        width=width // vae.spatial_compression_ratio,
        audio_frames=audio_frames,
    )


def channel_statistics(vae: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the video latents, by channel: (1, C, 1, 1, 1) each."""
    mean, std = vae.latents_mean, vae.latents_std
    return mean.view(1, -1, 1, 1, 1).to(dtype), std.view(1, -1, 1, 1, 1).to(dtype)


def pack_video(latents: Tensor) -> Tensor:
    """(B, C, F, H, W) -> tokens (B, F H W, C), a view."""
    return latents.flatten(2).transpose(1, 2)


def unpack_video(tokens: Tensor, shape: LatentShape) -> Tensor:
    """(B, F H W, C) -> (B, C, F, H, W), a view."""
    grid = tokens.view(tokens.shape[0], shape.frames, shape.height, shape.width, -1)
    return grid.permute(0, 4, 1, 2, 3)


def first_frame_mask(shape: LatentShape, *, videos: int, device: torch.device) -> Tensor:
    """fp32 (videos, 1, F, H, W), 1 at the first frame, else 0."""
    mask = torch.zeros(videos, 1, shape.frames, shape.height, shape.width, device=device)
    mask[:, :, 0] = 1.0
    return mask


def pack_audio(latents: Tensor) -> Tensor:
    """(B, C, T, M) -> tokens (B, T, C M)."""
    return latents.transpose(1, 2).flatten(2, 3)


def unpack_audio(tokens: Tensor, *, mel_bins: int) -> Tensor:
    """(B, T, C M) -> (B, C, T, M), a view. mel_bins: M, of the latents."""
    return tokens.view(*tokens.shape[:2], -1, mel_bins).transpose(1, 2)
