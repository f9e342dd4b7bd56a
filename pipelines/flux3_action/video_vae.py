"""The encoder half of the FLUX 3 video VAE: one canvas frame to a normalised latent (spec section 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accel.errors import ConfigError
from pipelines.flux3_action.policy_config import LATENT_CHANNELS
from pipelines.flux3_action.video_vae_layers import (
    Attention,
    Block,
    Grid,
    Linear,
    PatchEmbedding,
    PatchMerging,
    Sequence,
    TemporalMerging,
)


@dataclass(frozen=True, kw_only=True)
class VideoEncoderConfig:
    """Architecture; defaults are the released encoder. Triples are (time, height, width).

    depths, num_heads, temporal: one entry per stage; `temporal` stages end in a merge of two frames.
    z_dim: latent channels.
    """

    embed_dim: int = 256
    patch_size: Grid = (1, 4, 4)
    window_size: Grid = (5, 5, 5)
    depths: tuple[int, ...] = (1, 4, 8, 8)
    num_heads: tuple[int, ...] = (4, 8, 16, 32)
    temporal: tuple[bool, ...] = (False, False, True, True)
    z_dim: int = LATENT_CHANNELS


class VideoEncoder(nn.Module):
    """Canvas to normalised latent mean. Weights are allocated, not initialised: copy a checkpoint in.

    dtype: of weights and computation.
    """

    def __init__(self, config: VideoEncoderConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.encoder = _Encoder(config, dtype)
        self.z_normalizer = LatentNormalizer(config.z_dim, dtype)
        self._prepared: set[tuple[Grid, torch.device]] = set()
        self.requires_grad_(False)

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Checkpoint key (spec section 6.1) -> the tensor to copy its value into."""
        return {f"model.{name}": tensor for name, tensor in self.state_dict().items()}

    def prepare(self, canvas: Grid) -> None:
        """Build the position tables that `encode` reads for canvases of (T, H, W) frames and pixels.

        Call once the weights are on their device. `encode` does it itself on the first call of a
        size, but that copies from the host, which a graph capture forbids.

        Raises: ConfigError if the coarsest grid is smaller than the attention window.
        """
        device = self.z_normalizer.running_mean.device
        if (canvas, device) in self._prepared:
            return
        config, halvings = self.config, 2 ** (len(self.config.depths) - 1)
        for name, pixels, patch, window in zip(
            ("height", "width"), canvas[1:], config.patch_size[1:], config.window_size[1:], strict=True
        ):
            if math.ceil(pixels / (patch * halvings)) < window:
                raise ConfigError(
                    f"canvas {name} of {pixels} px is too small for the video encoder's attention window; "
                    f"use at least {patch * halvings * window} px per side"
                )
        self.encoder.prepare(canvas)
        self._prepared.add((canvas, device))

    def refresh(self) -> None:
        """Compute the tables of all prepared canvases again, in place, after weights changed in place."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.refresh()

    def encode(self, canvas: Tensor) -> Tensor:
        """(B, 3, T, H, W) in [-1, 1], any float dtype -> (B, z_dim, T', ceil(H/32), ceil(W/32)).

        One frame stays one frame. The result has the encoder's dtype.
        """
        _, _, *size = canvas.shape
        self.prepare((size[0], size[1], size[2]))
        moments = self.encoder(canvas.to(self.z_normalizer.running_mean.dtype))
        mean = moments[..., : self.config.z_dim].movedim(-1, 1)
        latent: Tensor = self.z_normalizer(mean)
        return latent


class LatentNormalizer(nn.Module):
    """(B, z_dim, T, h, w) -> zero mean and unit variance per channel; no epsilon."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, z_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.empty(z_dim, dtype=dtype))
        self.register_buffer("running_var", torch.empty(z_dim, dtype=dtype))
        self.register_buffer("initialized", torch.ones((), dtype=torch.bool))

    def forward(self, mean: Tensor) -> Tensor:
        shape = (-1, 1, 1, 1)
        return (mean - self.running_mean.view(shape)) / self.running_var.view(shape).sqrt()


class _Encoder(nn.Module):
    """(B, 3, T, H, W) -> (B, T', h, w, 2 * z_dim), mean then log-variance; channels-last inside."""

    def __init__(self, config: VideoEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding(config.embed_dim, config.patch_size, dtype)
        features = Sequence()
        width, stages = config.embed_dim, len(config.depths)
        for stage, depth in enumerate(config.depths):
            heads = config.num_heads[stage]
            features.append(Sequence(*(Block(width, heads, config.window_size, dtype) for _ in range(depth))))
            if stage + 1 < stages:
                features.append(PatchMerging(width, 2 * width, dtype))
                width, heads = 2 * width, config.num_heads[stage + 1]
            if config.temporal[stage]:
                features.append(Block(width, heads, config.window_size, dtype))
                features.append(TemporalMerging(width, dtype))
        self.features = features
        self.proj = Linear(width, 2 * config.z_dim, dtype=dtype)

    def prepare(self, canvas: Grid) -> None:
        self.features.prepare(self.patch_embed.prepare(canvas))

    def forward(self, canvas: Tensor) -> Tensor:
        moments: Tensor = self.proj(self.features(self.patch_embed(canvas)))
        return moments
