"""The matrix products, convolutions and attention of a call alone: what fusing the rest can't go below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel.graphs.buffers import clone_layout, storage_address
from accel.graphs.tree import map_tensors

_PRODUCTS = frozenset(
    ("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "_scaled_mm", "convolution", "conv2d", "conv3d")
)


def products_alone(fn: Callable[[], Any], weights: Iterable[Tensor]) -> Callable[[], None]:
    """The products of `fn` in its order, on these weights and on stand-ins for all other tensors."""
    recorder = _Recorder({storage_address(weight) for weight in weights})
    with recorder:
        fn()

    def run() -> None:
        for function, args, kwargs in recorder.calls:
            function(*args, **kwargs)

    return run


class _Recorder(TorchDispatchMode):
    """Notes calls of products. Activations of one layout share one stand-in, the first that was seen."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]] = []
        self._weights = weights
        self._stand_ins: dict[Any, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _PRODUCTS or "scaled_dot_product" in name:
            self.calls.append((func, *map_tensors((args, kwargs), self._kept)))
        return func(*args, **kwargs)

    def _kept(self, tensor: Tensor) -> Tensor:
        if storage_address(tensor) in self._weights:
            return tensor
        layout = tensor.shape, tensor.stride(), tensor.dtype
        if layout not in self._stand_ins:
            self._stand_ins[layout] = clone_layout(tensor)
        return self._stand_ins[layout]
