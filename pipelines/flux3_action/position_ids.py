"""Tokens of every stream: position ids and packing (spec section 9).

An id is (t, h, w, l): time in 10 ms units, latent row, latent column, text index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipelines.flux3_action.policy_config import PolicyConfig

ACTIONS_PER_LATENT_FRAME = 4


def stream_position_ids(config: PolicyConfig) -> dict[str, Tensor]:
    """Ids of the four token streams, in stream order: int64 (1, L, 4) on the CPU.

    video: K/4 frames of h*w tokens, frame by frame, row by row. video_cond: one such frame at
    time 0. Actions: K tokens. State: one token at time 0.
    """
    frames = torch.arange(1, config.latent_frames + 1, dtype=torch.float32, device="cpu")
    actions = torch.arange(1, config.chunk_size + 1, dtype=torch.float32, device="cpu")
    return {
        "video": _grid_ids(_ticks(frames * ACTIONS_PER_LATENT_FRAME / config.fps), config.latent_hw),
        "video_cond": _grid_ids(_ticks(torch.zeros(1, device="cpu")), config.latent_hw),
        config.action_stream: _grid_ids(_ticks(actions / config.fps), (1, 1)),
        config.state_stream: _grid_ids(_ticks(torch.zeros(1, device="cpu")), (1, 1)),
    }


def text_position_ids(length: int) -> Tensor:
    """Ids (0, 0, 0, i) of `length` text tokens, padding included: int64 (1, length, 4) on the CPU."""
    ids = torch.zeros(1, length, 4, dtype=torch.int64, device="cpu")
    ids[..., 3] = torch.arange(length, device="cpu")
    return ids


def pack_latents(latents: Tensor) -> Tensor:
    """Latents (B, C, T, h, w) -> tokens (B, T*h*w, C), frame by frame, row by row."""
    return latents.flatten(2).transpose(1, 2).contiguous()


def unpack_latents(tokens: Tensor, hw: tuple[int, int]) -> Tensor:
    """Tokens (B, T*h*w, C) -> latents (B, C, T, h, w); inverse of `pack_latents`."""
    return tokens.transpose(1, 2).reshape(tokens.shape[0], tokens.shape[2], -1, *hw).contiguous()


def pack_actions(actions: Tensor) -> Tensor:
    """Actions (B, A, K), the layout noise is drawn in -> tokens (B, K, A)."""
    return actions.transpose(1, 2).contiguous()


def unpack_actions(tokens: Tensor) -> Tensor:
    """Tokens (B, K, A) -> actions (B, A, K); inverse of `pack_actions`."""
    return tokens.transpose(1, 2).contiguous()


def _ticks(seconds: Tensor) -> Tensor:
    """Whole 10 ms units, in fp32 and in this order: another order moves ids at frame boundaries."""
    return (seconds * 1000 // 10).long()


def _grid_ids(ticks: Tensor, hw: tuple[int, int]) -> Tensor:
    """All (t, y, x, 0), t outermost: (1, len(ticks)*h*w, 4)."""
    height, width = hw
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    rows, columns = torch.arange(height, device="cpu"), torch.arange(width, device="cpu")
    return torch.cartesian_prod(ticks, rows, columns, zero).unsqueeze(0)
