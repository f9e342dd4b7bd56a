"""The allowlist: every fusion site, and the one gate per site of this process."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module

import torch

from accel.fusion import references
from accel.fusion.gate import Gate
from accel.fusion.site import Kernel, Site
from accel.policy import require_known


def _load(module: str) -> Kernel:
    """Import on first use: Triton is optional and slow to import."""
    kernel: Kernel = import_module(f"accel.fusion.kernels.{module}").KERNEL
    return kernel


_SITES = {
    site.name: site
    for site in (
        Site(
            name="modulate",
            reference=references.modulate,
            load=partial(_load, "modulate"),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            dims="(B, L, D), last stride 1",
            evidence="full tensors, tests/gpu/test_kernels_gpu.py",
        ),
        Site(
            name="swiglu",
            reference=references.swiglu,
            load=partial(_load, "swiglu"),
            dtypes=(torch.bfloat16,),
            dims="(B, L, 2F), last stride 1; contiguous (..., 2F)",
            evidence="all 65,536 encodings and full tensors, tests/gpu/test_kernels_gpu.py",
        ),
        Site(
            name="gated_residual",
            reference=references.gated_residual,
            load=partial(_load, "gated_residual"),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            dims="(B, L, D), last stride 1",
            evidence="full tensors, tests/gpu/test_kernels_gpu.py",
        ),
        Site(
            name="qk_norm_rope",
            reference=references.qk_norm_rope,
            load=partial(_load, "qk_norm_rope"),
            dtypes=(torch.bfloat16, torch.float16),
            dims="(B, L, H, 128), last stride 1",
            evidence="full tensors, tests/gpu/test_kernels_gpu.py",
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
