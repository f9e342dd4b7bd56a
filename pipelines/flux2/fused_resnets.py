"""The forward of the resnets of FLUX.2's VAE that calls a fusion site.

Source: fusion spec sections 3.4 and 8.4, diffusers 0.42 `resnet.py`.
"""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from accel.fusion import group_norm_silu
from accel.fusion.mounting import BlockForward, Draw, minor_version
from pipelines.flux2.known_structure import KNOWN


def resnet(block: Any, input_tensor: Tensor, temb: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """(B, C, H, W) -> (B, C', H, W). temb: `None`, a VAE has no timestep."""
    if temb is not None or args or kwargs:
        return NotImplemented
    norm1, norm2 = block.norm1, block.norm2
    hidden = group_norm_silu(input_tensor, norm1.num_groups, norm1.weight, norm1.bias, eps=norm1.eps)
    hidden = block.conv1(hidden)
    hidden = group_norm_silu(hidden, norm2.num_groups, norm2.weight, norm2.bias, eps=norm2.eps)
    hidden = block.conv2(block.dropout(hidden))
    if block.conv_shortcut is not None:
        input_tensor = block.conv_shortcut(input_tensor)
    total = input_tensor + hidden
    # Dividing by 1 changes no bit.
    return total if block.output_scale_factor == 1 else total / block.output_scale_factor


def _refuses(block: Any) -> str:
    if block.time_emb_proj is not None or block.time_embedding_norm == "scale_shift":
        return "it takes a timestep embedding"
    return "it resamples" if block.upsample is not None or block.downsample is not None else ""


def _examples(block: Any, draw: Draw) -> list[dict[str, Any]]:
    return [{"input_tensor": draw(2, block.in_channels, 5, 3), "temb": None}]


VAE_FORWARDS = (
    BlockForward(
        block=ResnetBlock2D,
        forward=resnet,
        sites=frozenset({"group_norm_silu"}),
        parts={"norm1": (nn.GroupNorm,), "norm2": (nn.GroupNorm,), "nonlinearity": (nn.SiLU,)},
        known=KNOWN.get(minor_version(diffusers.__version__), {}),
        refuses=_refuses,
        examples=_examples,
    ),
)
"""For the encoder or decoder of an `AutoencoderKLFlux2`."""
