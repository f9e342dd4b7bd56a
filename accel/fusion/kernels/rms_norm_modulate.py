"""rms_norm_modulate: n = r(x * rsqrt(mean(x * x) + eps)); y = r(r(r(1 + scale) * n) + shift), or n alone.

r rounds to the storage dtype. The kernel is that of residual_rms_norm_modulate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel.fusion.compare import tensors_of
from accel.fusion.kernels import residual_rms_norm_modulate as residual
from accel.fusion.site import Kernel
from accel.fusion.stress import first_rows


def _plan(x: Tensor, shift: Tensor | None, scale: Tensor | None, eps: float) -> Callable[..., Tensor]:
    norm_and_modulate = residual.plan_norm_and_modulate(x, None, None, shift, scale, None, None, eps)

    def run(x: Tensor, shift: Tensor | None, scale: Tensor | None, eps: float) -> Tensor:
        (out,) = norm_and_modulate(x, None, None, shift, scale, None, None, eps)
        return out

    return run


def _refuses(x: Tensor, shift: Tensor | None, scale: Tensor | None, eps: float) -> str:
    return residual.refuse_sources(x, eps, shift=shift, scale=scale)


def bytes_moved(*args: Any) -> int:
    """Bytes that must pass between memory and chip: every input once, the output once."""
    return sum(tensor.nbytes for tensor in tensors_of(args)) + int(args[0].nbytes)


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=first_rows)
