# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""channel_norm_silu: y = r(n / (1 + exp(-n))), n = r(x / r(sqrt(r(mean + eps)))), r rounding to bf16.

The mean of x**2 over the channels is ATen's own, so that its order cannot differ. All after it is one pass
over x, which finds the root once per pixel of a tile. Bytes, in sizes of x: 5 against 7 in eager.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.fusion.kernels.rounding import round_to, store_as, widen
from accel.fusion.launch import Launch
from accel.fusion.site import Kernel

# (channels, pixels) of a tile, long where memory is contiguous.
_PIXELS_INNER = (16, 256)
_CHANNELS_INNER = (128, 32)
_MAX_GRID = 65_535  # programs along the second and third axis of a launch


@triton.jit
def _channel_norm_silu_kernel(
    out,
    x,
    mean,
    channels,
    pixels,
    channel_stride,
    pixel_stride,
    eps,
    tile_channels: tl.constexpr,
    tile_pixels: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    pixel = (tl.program_id(0) * tile_pixels + tl.arange(0, tile_pixels))[None, :]
    channel = (tl.program_id(1) * tile_channels + tl.arange(0, tile_channels))[:, None]
    mean_square = widen(tl.load(mean + batch * pixels + pixel, mask=pixel < pixels, other=1.0))
    root = round_to(tl.sqrt_rn(round_to(mean_square + eps, tl.bfloat16)), tl.bfloat16)

    offset = channel.to(tl.int64) * channel_stride + pixel.to(tl.int64) * pixel_stride
    inside = (channel < channels) & (pixel < pixels)
    start = batch * channels * pixels
    value = widen(tl.load(x + start + offset, mask=inside, other=0.0))
    normed = round_to(tl.div_rn(value, tl.broadcast_to(root, value.shape)), tl.bfloat16)
    silu = normed / (1.0 + tl.exp(-normed))
    tl.store(out + start + offset, store_as(silu, tl.bfloat16), mask=inside)


def _plan(x: Tensor, eps: float) -> Callable[[Tensor, float], Tensor]:
    batch, channels = x.shape[:2]
    pixels = x.shape[2:].numel()
    pixels_inner = x.is_contiguous()
    tile_channels, tile_pixels = _PIXELS_INNER if pixels_inner else _CHANNELS_INNER
    launch = Launch(
        _channel_norm_silu_kernel,
        (triton.cdiv(pixels, tile_pixels), triton.cdiv(channels, tile_channels), batch),
        *(channels, pixels),
        *((pixels, 1) if pixels_inner else (1, channels)),
        eps,
        tile_channels=tile_channels,
        tile_pixels=tile_pixels,
    )

    def run(x: Tensor, _: float) -> Tensor:
        out = torch.empty_like(x)
        launch(out, x, torch.mean(x**2, dim=1, keepdim=True))
        return out

    return run


def _refuses(x: Tensor, eps: float) -> str:
    if x.dtype != torch.bfloat16:
        return f"x: {x.dtype}, not bf16"
    if x.dim() != 5:
        return f"x: {x.dim()} dimensions, not 5"
    if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last_3d)):
        return f"x: strides {x.stride()}"
    if max(x.shape[0], x.shape[1]) > _MAX_GRID:
        return f"x: shape {tuple(x.shape)}, more than {_MAX_GRID} samples or channels"
    return ""


def _shorten(x: Tensor, eps: float) -> tuple[Tensor, float]:
    """One channel, whose mean is its own square: a pattern in one row would else spoil all others."""
    return x[:, :1, :1].contiguous(), eps


def bytes_moved(x: Tensor, eps: float) -> int:
    """Bytes that must pass between memory and chip: the input once, the output once."""
    return 2 * x.nbytes


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=_shorten)
