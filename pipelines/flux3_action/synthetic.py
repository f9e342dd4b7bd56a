"""Seeded random weights of any architecture, and DROID-shaped configs to go with them.

Outputs mean nothing; shapes, dtypes, speed and bits are those of a real run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from accel.fusion import quantize_rows
from pipelines.flux3_action.package import variant_subfolder
from pipelines.flux3_action.policy_config import (
    CONTENT_STREAMS,
    LATENT_CHANNELS,
    PolicyConfig,
    TransformerConfig,
)
from pipelines.flux3_action.video_vae import VideoEncoderConfig

Size = Literal["tiny", "full"]

_MODALITY = "action_prediction_droid"
_STREAMS = {**dict.fromkeys(CONTENT_STREAMS, LATENT_CHANNELS), _MODALITY: 8, f"{_MODALITY}_cond": 8}
_SCALE_SUFFIX = "_scale"
# What the architecture fixes; modules are made with it.
_CONSTANTS = ("rope.inv_freq", "z_normalizer.initialized")


def droid_config(size: Size, variant: str = "base") -> PolicyConfig:
    """The released DROID policy (spec section 17), or the same with small widths.

    variant: as in the table of spec section 2. The distilled variants' guidance of 1 and `sd`'s single
        step are assumed from that table; their real configs were not published when it was written.
    Raises: ConfigError for an unknown variant.
    """
    variant_subfolder(variant)
    config = PolicyConfig(
        action_modality=_MODALITY,
        action_dim=8,
        chunk_size=32,
        camera_layout="droid",
        camera_keys=("images.wrist", "images.left", "images.right"),
        canvas_hw=(544, 736),
        transformer=TransformerConfig(in_channels=_STREAMS) if size == "full" else _tiny_transformer(),
        gripper_flip_dims=(-1,),
        num_inference_steps=1 if variant.startswith("sd") else 4,
        guidance_scale=4.0,
        guidance_scale_action=1.0,
        sampler_shift=5.0,
        quantization="fp8r" if variant.endswith("fp8r") else None,
    )
    if variant.startswith(("gd", "sd")):
        config = replace(config, guidance_scale=1.0)
    return config if size == "full" else replace(config, text_output_layers=(1, 2))


def video_encoder_config(size: Size) -> VideoEncoderConfig:
    """The released encoder, or the same with small widths; both halve the canvas five times."""
    if size == "full":
        return VideoEncoderConfig()
    return VideoEncoderConfig(embed_dim=8, num_heads=(1, 1, 1, 2), depths=(1, 1, 1, 1))


def fill_synthetic(slots: Mapping[str, Tensor], *, seed: int, prefix: str) -> None:
    """Fill all that is learned with values of a scale that keeps activations finite in bf16 at any depth.

    slots: checkpoint key -> tensor, written in place. prefix: component name, makes keys unique.
    Each tensor depends on (seed, prefix, key) and the device alone, not on the others. FP8 weights are
    quantised by row, their scales written to the neighbouring `weight_scale`.
    """
    with torch.no_grad():
        for key, slot in slots.items():
            if key.endswith((".weight" + _SCALE_SUFFIX, *_CONSTANTS)):
                continue  # scales are written together with their weight
            generator = torch.Generator(slot.device).manual_seed(_stable_seed(seed, prefix + key))
            values = _values(key, slot, generator)
            if slot.dtype == torch.float8_e4m3fn:
                values, scale = quantize_rows(values)
                slots[key + _SCALE_SUFFIX].copy_(scale)
            slot.copy_(values)


def _values(key: str, slot: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 values of the slot's shape, by what the key names."""
    noise = torch.randn(slot.shape, generator=generator, device=slot.device, dtype=torch.float32)
    if key.endswith("running_var"):
        return 1 + 0.1 * noise.abs()
    if slot.ndim > 1:
        return noise / math.sqrt(math.prod(slot.shape[1:]))
    is_offset = key.endswith((".bias", "running_mean"))
    return 0.1 * noise if is_offset else 1 + 0.1 * noise


def _stable_seed(seed: int, key: str) -> int:
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # torch takes 63 bits on every device


def _tiny_transformer() -> TransformerConfig:
    return TransformerConfig(
        in_channels=_STREAMS,
        vec_in_dim=16,
        context_in_dim=128,  # two output layers of the tiny text encoder, 64 wide
        hidden_size=64,
        num_heads=4,
        depth=1,
        depth_single_blocks=2,
        axes_dim=(4, 4, 4, 4),
    )
