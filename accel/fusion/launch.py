"""Launches of which all but the addresses is settled once.

Triton binds, specialises and looks up a kernel anew at every launch, which takes the host longer than a
small kernel takes the device. Source: fusion spec section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction


class Launch:
    """A kernel with its grid, scalars and constants; called with its tensors, the first of its arguments.

    All calls must pass tensors of the same dtypes, device and alignment to 16 bytes, `None` at the same
    places: what Triton compiles depends on those, and on the scalars. Arguments that share a layout
    (`accel.fusion.signature.layout_of`) do.
    Fused multiply-adds are left to the kernel: contraction would skip a rounding.
    """

    def __init__(
        self, kernel: Any, grid: Sequence[int], *scalars: float, num_warps: int = 4, **constants: Any
    ) -> None:
        """constants: by the names of the parameters that follow the scalars."""
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._options = {"num_warps": num_warps, "enable_fp_fusion": False}
        names = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
        self._tail = (*scalars, *(constants[name] for name in names))
        self._run: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Put it on the current stream. All tensors must be on the current device: nothing checks that."""
        if self._run is None:
            self._run = self._compiled(*tensors)
        self._run(*tensors)

    def _compiled(self, *tensors: Tensor | None) -> Callable[..., Any]:
        tail = self._tail
        if not isinstance(self._kernel, JITFunction):
            interpret = self._kernel[self._grid]
            return lambda *tensors: interpret(*tensors, *tail, **self._options)
        run = self._kernel.warmup(*tensors, *tail, grid=self._grid, **self._options)[self._grid]
        # Of an address Triton does not ask the driver what it is.
        return lambda *tensors: run(*[each if each is None else each.data_ptr() for each in tensors], *tail)


def allocator(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes new contiguous tensors, in a third of the time of `torch.empty`."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    return partial(torch.empty_strided, tuple(shape), strides, dtype=dtype, device=device)
