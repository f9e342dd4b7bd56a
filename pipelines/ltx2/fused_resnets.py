"""The forward of the resnets of LTX-2's video VAE that calls a fusion site.

Source: fusion spec section 8.4, diffusers 0.42 `autoencoder_kl_ltx2.py`.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import LTX2VideoResnetBlock3d, PerChannelRMSNorm
from torch import Tensor, nn

from accel.fusion import channel_norm_silu
from accel.fusion.mounting import BlockForward, Draw, minor_version
from pipelines.ltx2.known_structure import KNOWN


def resnet(
    block: Any,
    inputs: Tensor,
    temb: Tensor | None = None,
    generator: torch.Generator | None = None,
    causal: bool = True,
) -> Tensor:
    """(B, C, T, H, W) -> (B, C', T, H, W). causal: time is padded in front alone."""
    hidden = channel_norm_silu(inputs, eps=block.norm1.eps)
    hidden = block.conv1(hidden, causal=causal)
    hidden = channel_norm_silu(hidden, eps=block.norm2.eps)
    hidden = block.conv2(block.dropout(hidden), causal=causal)
    if block.norm3 is not None:
        inputs = block.norm3(inputs.movedim(1, -1)).movedim(-1, 1)
    if block.conv_shortcut is not None:
        inputs = block.conv_shortcut(inputs)
    output: Tensor = hidden + inputs
    return output


def _refuses(block: Any) -> str:
    if block.scale_shift_table is not None:
        return "it takes a timestep embedding"
    if block.per_channel_scale1 is not None or block.per_channel_scale2 is not None:
        return "it adds noise"
    return "" if block.norm1.channel_dim == block.norm2.channel_dim == 1 else "it norms another dimension"


def _examples(block: Any, draw: Draw) -> list[dict[str, Any]]:
    inputs = draw(1, block.conv1.in_channels, 3, 4, 5)
    return [{"inputs": inputs, "causal": causal} for causal in (True, False)]


VAE_FORWARDS = (
    BlockForward(
        block=LTX2VideoResnetBlock3d,
        forward=resnet,
        sites=frozenset({"channel_norm_silu"}),
        parts={
            "norm1": (PerChannelRMSNorm,),
            "norm2": (PerChannelRMSNorm,),
            "nonlinearity": (nn.SiLU,),
        },
        known=KNOWN.get(minor_version(diffusers.__version__), {}),
        refuses=_refuses,
        examples=_examples,
    ),
)
"""For the encoder or decoder of an `AutoencoderKLLTX2Video`."""
