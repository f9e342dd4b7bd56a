"""Finding what can't be captured while a region is recorded, and making breaks of it.

Such an operation runs eagerly between two segments, at the recording and at every replay. Values that
reach Python that way (numbers, host tensors, shapes) must be the recorded ones at every replay, since
Python's decisions are part of the graph. Two levels are watched: operations, and Python functions
whose inner copies no operation mode sees (`torch.tensor` of a list, an index that is a list).
Source: graph spec section 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from accel.graphs.backend import GraphBackend
from accel.graphs.breaks import Break, break_here
from accel.record import Reason

# Results that depend on values: numbers for Python, or shapes.
_TAGS = frozenset(
    tag
    for name, tag in torch.Tag.__members__.items()
    if name in ("data_dependent_output", "dynamic_output_shape", "cudagraph_unsafe")
)
_WAITING = frozenset(("aten::_linalg_check_errors", "aten::is_nonzero"))
# They count the true elements of a mask.
_INDEXING = frozenset(
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
)
_COPIES = frozenset(("aten::_to_copy", "aten::copy_"))
_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray)
_METHODS = (Tensor.__getitem__, Tensor.__setitem__, Tensor.new_tensor, Tensor.tolist)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Session(Protocol):
    """The recording that the modes watch. active: a segment is open."""

    active: bool

    def eager(
        self, at: Break, fn: Callable[..., Any], args: Args, kwargs: Kwargs, key: Any = None
    ) -> Any: ...

    def upload(self, at: Break, make: Callable[[], Tensor]) -> Tensor: ...

    def host_inputs(self, at: Break, tensors: list[Tensor]) -> None: ...

    def refuse(self, reason: Reason, detail: str) -> NoReturn: ...

    def note_made(self, value: Any) -> None: ...


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation before it runs."""

    def __init__(self, session: Session, backend: GraphBackend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session
        self._backend = backend

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._session.active:
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        host = [tensor for tensor in tensors if self._backend.on_host(tensor)]
        run = self._host_operation if len(host) == len(tensors) else self._device_operation
        value = run(func, args, kwargs, host)
        self._session.note_made(value)
        return value

    def _host_operation(self, func: Any, args: Args, kwargs: Kwargs, host: list[Tensor]) -> Any:
        """No tensor on the device goes in. Runs at the recording alone; its results are constants."""
        to_host = self._backend.asks_for_host(kwargs)
        if (host or to_host) and torch.Tag.nondeterministic_seeded in func.tags:
            at = break_here("automatic", str(func))
            self._session.refuse(
                Reason.CAPTURE_FAILED, f"{at}: random numbers drawn on the host; pass them as an argument"
            )
        if host and to_host is False and func._schema.name == "aten::_to_copy":
            at = break_here("automatic", str(func))
            self._session.host_inputs(at, host)
            return self._session.upload(at, lambda: func(*args, **kwargs))
        if host and _depends_on_values(func, args, kwargs):
            self._session.host_inputs(break_here("automatic", str(func)), host)
        return func(*args, **kwargs)

    def _device_operation(self, func: Any, args: Args, kwargs: Kwargs, host: list[Tensor]) -> Any:
        # Kernels take single host numbers by value; other host tensors would be copied inside.
        by_value = torch.Tag.pointwise in func.tags and all(tensor.dim() == 0 for tensor in host)
        copied = self._backend.asks_for_host(kwargs) or (bool(host) and not by_value)
        if copied or _depends_on_values(func, args, kwargs):
            args, kwargs = _blocking(func, args, kwargs)
            at = break_here("automatic", str(func))
            return self._session.eager(at, func, args, kwargs, key=_key(func, args, kwargs))
        if host:
            self._session.host_inputs(break_here("automatic", str(func)), host)
        return func(*args, **kwargs)


class ConstructorMode(TorchFunctionMode):
    """Sees the Python functions that copy between host and device inside."""

    def __init__(self, session: Session, backend: GraphBackend) -> None:
        super().__init__()
        self._session = session
        self._backend = backend

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._session.active:
            return func(*args, **kwargs)
        if func in _CONSTRUCTORS and not isinstance(_data(args, kwargs), Tensor):
            return self._construct(func, args, kwargs)
        if func in _METHODS and not self._backend.on_host(args[0]):
            return self._method(func, args, kwargs)
        return func(*args, **kwargs)

    def _method(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        tensor = args[0]
        if func is Tensor.tolist:
            at = break_here("automatic", "Tensor.tolist")
            return self._session.eager(at, func, args, kwargs, key=_key(func, args, kwargs))
        if func is Tensor.new_tensor:
            options = {"dtype": tensor.dtype, "device": tensor.device} | kwargs
            return self._construct(torch.tensor, args[1:], options)
        return func(tensor, self._index(args[1], tensor.device), *args[2:])

    def _construct(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """The tensor made on the host, and brought to the device as a constant."""
        device = kwargs.get("device")
        device = torch.get_default_device() if device is None else torch.device(device)
        elsewhere = device.type != self._backend.device.type
        if elsewhere or self._backend.asks_for_host({**kwargs, "device": device}):
            return func(*args, **kwargs)
        at = break_here("automatic", f"torch.{func.__name__}")
        source = func(*_with_host_elements(args), **{**_with_host_elements(kwargs), "device": "cpu"})
        self._session.host_inputs(at, [source])  # it may be a view of the caller's array
        return self._session.upload(at, lambda: source.to(device, copy=True))

    def _index(self, index: Any, device: torch.device) -> Any:
        """An index whose lists and arrays are device tensors."""
        if isinstance(index, tuple):
            return tuple(self._index(part, device) for part in index)
        if _is_numbers(index):
            return self._construct(torch.as_tensor, (index,), {"device": device})
        return index


def _depends_on_values(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether the host has to know values on the device to go on."""
    name = func._schema.name
    if name in _INDEXING:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return name in _WAITING or not _TAGS.isdisjoint(func.tags)


def _blocking(func: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """A copy to the host has to be complete before its values are compared."""
    if func._schema.name in _COPIES:
        return args[:2], {name: value for name, value in kwargs.items() if name != "non_blocking"}
    return args, kwargs


def _key(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Equal for equal calls on the same memory; `None` if the call can't be told by a key."""
    parts = [
        (part.data_ptr(), part.dtype, part.shape, part.stride()) if isinstance(part, Tensor) else part
        for part in (*args, *kwargs.values())
    ]
    try:
        hash(key := (func, *parts, *kwargs))
    except TypeError:
        return None
    return key


def _data(args: Args, kwargs: Kwargs) -> Any:
    return args[0] if args else next((kwargs[name] for name in ("data", "obj") if name in kwargs), None)


def _with_host_elements(value: Any) -> Any:
    """Lists of numbers in which single device tensors are read as host tensors, dtype kept."""
    if isinstance(value, dict):
        return {name: _with_host_elements(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_host_elements(item) for item in value]
    if isinstance(value, Tensor):
        return torch.tensor(value.item(), dtype=value.dtype, device="cpu")
    return value


def _is_numbers(index: Any) -> bool:
    """Whether an index is a list or array of numbers, which indexing would bring to the device."""
    if isinstance(index, list):
        return bool(index) and all(isinstance(part, int) or _is_numbers(part) for part in index)
    return isinstance(index, np.ndarray) and index.ndim > 0


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]
