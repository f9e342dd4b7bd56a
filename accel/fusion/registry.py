"""The allowlist: every fusion site, and the one gate per site of this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from accel.fusion import references
from accel.fusion.gate import Gate
from accel.fusion.site import Kernel, Site
from accel.policy import require_known

_BF16 = (torch.bfloat16,)
_HALF = (torch.bfloat16, torch.float16)
_ALL = (torch.bfloat16, torch.float16, torch.float32)


_LAYER_NORM = "(B, L, D), D a multiple of 4 up to 8,192"
_RMS_NORM = "(B, L, D), at least 16 rows, D a multiple of 4 from 128 up to 8,160"

# Where the kernels are compared with eager on whole tensors.
_FIRST = "tests/gpu/test_kernels_gpu.py"
_NORMS = "tests/gpu/test_norm_kernels_gpu.py"
_ROPE = "tests/gpu/test_rope_and_step_kernels_gpu.py"
_QUANTIZE = "tests/gpu/test_quantize_kernels_gpu.py"
_VAE = "tests/gpu/test_vae_norm_kernels_gpu.py"


def _site(
    reference: Callable[..., Any],
    dtypes: tuple[torch.dtype, ...],
    dims: str,
    *,
    proof: str = _FIRST,
    exhaustive: bool = False,
) -> Site:
    name = reference.__name__
    return Site(
        name=name,
        reference=reference,
        load=partial(_load, name),
        dtypes=dtypes,
        dims=dims,
        evidence=f"{'all 65,536 encodings and ' if exhaustive else ''}full tensors, {proof}",
    )


def _load(module: str) -> Kernel:
    """Import on first use: Triton is optional and slow to import."""
    kernel: Kernel = import_module(f"accel.fusion.kernels.{module}").KERNEL
    return kernel


_SITES = {
    site.name: site
    for site in (
        _site(references.modulate, _ALL, "(B, L, D), last stride 1"),
        _site(references.gated_residual, _ALL, "(B, L, D), last stride 1"),
        _site(references.layer_norm_modulate, _ALL, _LAYER_NORM, proof=_NORMS),
        _site(references.residual_layer_norm_modulate, _ALL, _LAYER_NORM, proof=_NORMS),
        _site(references.rms_norm_modulate, _ALL, _RMS_NORM, proof=_NORMS),
        _site(references.residual_rms_norm_modulate, _ALL, _RMS_NORM, proof=_NORMS),
        _site(references.qk_norm_rope, _HALF, "(B, L, H, 128), last stride 1"),
        _site(references.joint_qk_norm_rope, _HALF, "(B, L, H, 128), last stride 1", proof=_ROPE),
        _site(references.qk_norm_split_rope, _HALF, "(B, L, H d), a multiple of 4 up to 8,192", proof=_ROPE),
        _site(
            references.swiglu,
            _BF16,
            "(B, L, 2F), last stride 1; contiguous (..., 2F)",
            proof=_FIRST,
            exhaustive=True,
        ),
        _site(
            references.swiglu_concat,
            _BF16,
            "(B, L, D) and (B, L, 2F), last stride 1",
            proof=_ROPE,
            exhaustive=True,
        ),
        _site(references.quantize_rows, _BF16, "(..., K), K up to 20,480", proof=_QUANTIZE),
        _site(
            references.swiglu_quantize_rows,
            _BF16,
            "(..., 2F), F up to 20,480",
            proof=_QUANTIZE,
            exhaustive=True,
        ),
        _site(references.guided_euler_step, _ALL, "contiguous", proof=_ROPE),
        _site(references.group_norm_silu, _BF16, "(B, C, H, W), at least 512 pixels", proof=_VAE),
        _site(
            references.channel_norm_silu, _BF16, "(B, C, T, H, W), contiguous or channels_last_3d", proof=_VAE
        ),
    )
}


def sites() -> tuple[Site, ...]:
    """All sites, in the order of `accel.site_names.SITE_NAMES`."""
    return tuple(_SITES.values())


def get(name: str) -> Site:
    """The site called `name`. Raises: ConfigError with the nearest known name."""
    if name not in _SITES:
        require_known("fusion site", name, tuple(_SITES))
    return _SITES[name]


@cache
def gate(name: str) -> Gate:
    """The process-wide gate of the site."""
    return Gate(get(name))
