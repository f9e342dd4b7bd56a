"""Graphs without a GPU: records the operations of a capture and repeats them on the same memory.

Shows what real graphs show: constants baked in, inputs that were not copied in, results that the
next replay overwrites, memory that is reused once the region dropped it, operations that may not be
captured. For tests; speed is no aim.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel.fusion.compare import tensors_of
from accel.graphs.backend import CapturedGraph, DeviceLock, capture_whole
from accel.graphs.breaks import Break
from accel.graphs.buffers import storage_address
from accel.graphs.tree import map_tensors

# They wait for the device, which a capture forbids.
_FORBIDDEN = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
)
_ALLOCATIONS = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


@dataclass(frozen=True)
class _Operation:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor | None]  # None where one shares the memory of an argument, which is fixed already

    def repeat(self) -> None:
        value = self.function(*self.args, **self.kwargs)
        for fixed, new in zip(self.results, tensors_of(value), strict=True):
            if fixed is not None:
                fixed.copy_(new)


def _spoil(memory: Tensor) -> None:
    memory.fill_(float("nan") if memory.is_floating_point() else 1)


class RecordedGraph:
    """The operations of one capture and the memory they work on."""

    breaks: tuple[Break, ...] = ()
    runs_python = False

    def __init__(self, operations: list[_Operation]) -> None:
        self.outputs: Any = None
        self.empty = all(operation.function is _spoil for operation in operations)
        self._operations = operations
        for result in self._results():  # captured work does not run: what it left is garbage
            _spoil(result)

    @property
    def nbytes(self) -> int:
        return sum(result.nbytes for result in self._results())

    def replay(self) -> None:
        with torch.no_grad():
            for operation in self._operations:
                operation.repeat()

    def release(self) -> None:
        self.outputs = None
        self._operations = []

    def _results(self) -> Iterator[Tensor]:
        return (r for operation in self._operations for r in operation.results if r is not None)


class RecordingBackend:
    """A graph backend for CPU tensors.

    fail_at: the recorded operation, counted from 0, at which recording raises RuntimeError.
    host_dtype: tensors of this dtype stand for host memory, all others for device memory.
    captures: recordings that succeeded. attempts: recordings begun. Every segment counts.
    """

    def __init__(self, *, fail_at: int | None = None, host_dtype: torch.dtype | None = None) -> None:
        self.device = torch.device("cpu")
        self.captures = 0
        self.attempts = 0
        self._host_dtype = host_dtype
        self._lock = DeviceLock()
        self._recorder = _Recorder(fail_at, self.on_host)
        self._streams = [0]
        self._graphs: weakref.WeakSet[RecordedGraph] = weakref.WeakSet()

    def exclusive(self) -> DeviceLock:
        return self._lock

    @contextmanager
    def warm_stream(self) -> Iterator[None]:
        if self._recorder.installed:
            yield
            return
        with self._recorder.install():
            yield

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Stands for a stream that the region makes current."""
        self._streams.append(len(self._streams))
        try:
            yield
        finally:
            self._streams.pop()

    def new_pool(self) -> object:
        return object()

    def capture(self, fn: Callable[[], Any], pool: Any) -> CapturedGraph:
        with self.warm_stream():
            return capture_whole(self, fn, pool)

    def begin(self, pool: Any) -> None:
        self.attempts += 1
        self._recorder.begin()

    def end(self) -> RecordedGraph:
        graph = RecordedGraph(self._recorder.end())
        self._graphs.add(graph)
        self.captures += 1
        return graph

    def abort(self) -> None:
        if self.is_capturing():
            self._recorder.end()

    def on_capture_stream(self) -> bool:
        return len(self._streams) == 1

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.dtype == self._host_dtype

    def asks_for_host(self, options: Mapping[str, Any]) -> bool | None:
        dtype = options.get("dtype")
        return None if dtype is None else dtype == self._host_dtype

    def join_previous(self) -> None: ...

    def is_capturing(self) -> bool:
        return self._recorder.recording

    def synchronize(self) -> None: ...

    def trim(self) -> None: ...

    def reserved_bytes(self) -> int:
        return sum(graph.nbytes for graph in self._graphs)

    def rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stays installed while a region runs on the capture stream; records between `begin` and `end`."""

    def __init__(self, fail_at: int | None, on_host: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.installed = False
        self.recording = False
        self._operations: list[_Operation] = []
        self._fail_at = fail_at
        self._seen = 0
        self._on_host = on_host
        self._sharers: Counter[int] = Counter()  # live tensors by the recorded memory they share

    @contextmanager
    def install(self) -> Iterator[None]:
        self.installed = True
        try:
            with self:
                yield
        finally:
            self.installed = False
            self._operations = []
            self._sharers.clear()

    def begin(self) -> None:
        self.recording = True

    def end(self) -> list[_Operation]:
        operations, self._operations = self._operations, []
        self.recording = False
        return operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode, operations that are made of others arrive whole: `item`, for one
            value = func.decompose(*args, **kwargs)
        if value is not NotImplemented:
            return value
        given = list(tensors_of([*args, *kwargs.values()]))
        on_host = bool(given) and all(self._on_host(tensor) for tensor in given)
        record = self.recording and not on_host
        value = self._record(func, args, kwargs) if record else func(*args, **kwargs)
        for result in tensors_of(value):
            self._watch(result)
        return value

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if name in _FORBIDDEN or _selects_by_mask(name, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if self._seen == self._fail_at:
            raise RuntimeError(f"injected failure at operation {self._seen}: {name}")
        self._seen += 1
        # Aliases, because operations such as `squeeze_` change the shape of the tensor object itself.
        fixed_args, fixed_kwargs = map_tensors((args, kwargs), Tensor.detach)
        given = {storage_address(tensor) for tensor in tensors_of([*args, *kwargs.values()])}
        value = func(*args, **kwargs)
        # By memory, not by schema: what is declared as a view may copy where it must.
        results = [None if storage_address(r) in given else r.detach() for r in tensors_of(value)]
        for result in results:
            if result is not None:
                self._sharers.setdefault(storage_address(result), 0)
        if name not in _ALLOCATIONS:
            self._operations.append(_Operation(func, fixed_args, fixed_kwargs, results))
        return value

    def _watch(self, result: Tensor) -> None:
        """Spoil recorded memory where the last tensor that shares it dies: a pool would reuse it there."""
        address = storage_address(result)
        if address in self._sharers:
            self._sharers[address] += 1
            weakref.finalize(result, self._drop, address, result.detach()).atexit = False

    def _drop(self, address: int, memory: Tensor) -> None:
        if address not in self._sharers:
            return
        self._sharers[address] -= 1
        if not self._sharers[address]:
            del self._sharers[address]
            self._operations.append(_Operation(_spoil, (memory,), {}, []))


def _selects_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Indexing with booleans: the size of the result is known on the device alone."""
    return name == "aten::index" and any(index.dtype == torch.bool for index in tensors_of(args[1]))
