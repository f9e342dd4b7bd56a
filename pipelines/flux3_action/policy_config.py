"""The native configuration of a FLUX 3 Action package, parsed and checked (spec section 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CameraLayout = Literal["droid", "single", "side_by_side", "grid"]
Sampler = Literal["cosmos_unipc", "euler"]

CONTENT_STREAMS = ("video", "video_cond")
LATENT_CHANNELS = 96
"""Channels of the video latents, which both content streams carry (spec section 6)."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Architecture of the joint denoiser. Defaults are the released model.

    in_channels: stream name -> channels, in stream order: video, video_cond, the action
        modality, its conditioning stream.
    """

    in_channels: dict[str, int]
    vec_in_dim: int | None = 768
    context_in_dim: int = 20480
    hidden_size: int = 3072
    num_heads: int = 24
    depth: int = 5
    depth_single_blocks: int = 28
    axes_dim: tuple[int, ...] = (32, 32, 32, 32)
    theta: float = 10000.0
    mlp_ratio: float = 3.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_hidden(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self.in_channels)


@dataclass(frozen=True, kw_only=True)
class QuantileStats:
    """Per-channel 1 % and 99 % quantiles, dataset units."""

    q01: tuple[float, ...]
    q99: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """One policy package: cameras, action space, architecture and sampling defaults.

    action_dim: width A of state and actions. chunk_size: actions K in a chunk.
    canvas_hw: pixels, multiples of 32. fps: control rate in Hz.
    action_scale: multiplies state and action tokens. normalization_clip: bound of normalised state.
    guidance_scale_action: `None` follows the video scale.
    quantization: `fp8r` for row-wise E4M3 linears.
    """

    action_modality: str
    action_dim: int
    chunk_size: int
    camera_layout: CameraLayout
    camera_keys: tuple[str, ...]
    canvas_hw: tuple[int, int]
    transformer: TransformerConfig
    n_action_steps: int = 32
    fps: float = 15.0
    action_scale: float = 2.0
    gripper_flip_dims: tuple[int, ...] = ()
    action_parameterization: Literal["absolute", "joint_delta"] = "absolute"
    absolute_action_dims: tuple[int, ...] = ()
    action_normalization: QuantileStats | None = None
    state_normalization: QuantileStats | None = None
    normalization_clip: float = 6.0
    quantization: Literal["fp8r"] | None = None
    sampler: Sampler = "cosmos_unipc"
    num_inference_steps: int = 4
    guidance_scale: float = 1.0
    guidance_scale_action: float | None = None
    sampler_shift: float = 1.0
    inference_seed: int = 0
    video_vae_id: str = ""
    text_encoder_id: str = ""
    text_output_layers: tuple[int, ...] = (4, 8, 12, 16, 20, 24, 28, 32)
    notes: tuple[str, ...] = field(default=())

    @property
    def action_stream(self) -> str:
        return self.action_modality

    @property
    def state_stream(self) -> str:
        return f"{self.action_modality}_cond"

    @property
    def latent_frames(self) -> int:
        """Predicted video latent frames, one for four actions."""
        return self.chunk_size // 4

    @property
    def latent_hw(self) -> tuple[int, int]:
        """Latent grid kept of the canvas: ceil(content / 32), mirrored margin dropped (spec section 4)."""
        height, width = (540, 640) if self.camera_layout == "droid" else self.canvas_hw
        return -(-height // 32), -(-width // 32)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Camera names in layout order, `images.` stripped."""
        return tuple(key.removeprefix("images.") for key in self.camera_keys)
