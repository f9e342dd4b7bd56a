"""layer_norm_modulate: n = r(layer_norm(x)); y = r(r(r(1 + scale) * n) + shift), r rounding to storage.

The kernel is that of residual_layer_norm_modulate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel.fusion.compare import tensors_of
from accel.fusion.kernels import residual_layer_norm_modulate as residual
from accel.fusion.kernels.row_norms import refuse_layer_norm
from accel.fusion.site import Kernel


def _plan(
    x: Tensor, shift: Tensor, scale: Tensor, segment: Tensor | None, eps: float
) -> Callable[..., Tensor]:
    norm_and_modulate = residual.plan_norm_and_modulate(x, None, None, None, shift, scale, segment, eps)

    def run(x: Tensor, shift: Tensor, scale: Tensor, segment: Tensor | None, eps: float) -> Tensor:
        _, out = norm_and_modulate(x, None, None, None, shift, scale, segment, eps)
        return out

    return run


def _refuses(x: Tensor, shift: Tensor, scale: Tensor, segment: Tensor | None, eps: float) -> str:
    refusal = residual.refuse_modulated(x, segment, shift=shift, scale=scale)
    if not refusal and x.is_contiguous() and x.data_ptr() % (4 * x.element_size()):
        # Rows that are not contiguous ATen copies first, to aligned memory.
        refusal = "x: does not start at a multiple of four elements, as ATen's vectorised kernel needs"
    return refusal or refuse_layer_norm(x.shape[2], eps)


def _shorten(x: Tensor, shift: Tensor, scale: Tensor, segment: Tensor | None, eps: float) -> tuple[Any, ...]:
    x, _, _, _, *others = residual.shorten(x, None, None, None, shift, scale, segment, eps)
    return x, *others


def bytes_moved(*args: Any) -> int:
    """Bytes that must pass between memory and chip: every input once, the output once."""
    return sum(tensor.nbytes for tensor in tensors_of(args)) + int(args[0].nbytes)


KERNEL = Kernel(plan=_plan, refuses=_refuses, shorten=_shorten)
