"""Between the VAE's latents and the transformer's tokens: 2x2 patches, normalised by stored statistics.

Shapes: B images, c VAE channels, C = 4 c token channels, h and w rows and columns of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipelines.flux2.image_size import PATCH
from pipelines.flux2.position_ids import Grid


def tokens_from_latents(vae: Any, latents: Tensor) -> Tensor:
    """(B, c, 2 h, 2 w) -> (B, h w, C), normalised."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    patches = patches.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    mean, std = _statistics(vae, patches)
    return ((patches - mean) / std).flatten(2).permute(0, 2, 1)


def latents_from_tokens(vae: Any, tokens: Tensor, grid: Grid) -> Tensor:
    """(B, h w, C) -> (B, c, 2 h, 2 w). grid: h and w."""
    batch, _, channels = tokens.shape
    patches = tokens.permute(0, 2, 1).reshape(batch, channels, *grid)
    mean, std = _statistics(vae, patches)
    patches = (patches * std + mean).reshape(batch, -1, PATCH, PATCH, *grid)
    rows, columns = grid
    return patches.permute(0, 1, 4, 2, 5, 3).reshape(batch, -1, rows * PATCH, columns * PATCH)


def _statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every token channel, (1, C, 1, 1), in the dtype of `like`."""
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    return mean.to(like.dtype), std.to(like.dtype)
