"""Graphs without a GPU: records the operations of a capture and repeats them on the same memory.

Shows what real graphs show: constants baked in, inputs that were not copied in, results that the
next replay overwrites, operations that may not be captured. For tests; speed is no aim.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel.graphs.backend import CaptureFailedError
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
    results: list[Tensor]  # empty where they alias an argument

    def repeat(self) -> None:
        value = self.function(*self.args, **self.kwargs)
        if self.results:
            for fixed, new in zip(self.results, _tensors(value), strict=True):
                fixed.copy_(new)


class RecordedGraph:
    """The operations of one capture and the memory they work on."""

    def __init__(self, operations: list[_Operation], outputs: Any) -> None:
        self.outputs = outputs
        self._operations = operations
        for result in self._results():  # captured work does not run: what it left is garbage
            result.fill_(float("nan") if result.is_floating_point() else 1)

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
        return (result for operation in self._operations for result in operation.results)


class RecordingBackend:
    """A graph backend for CPU tensors.

    fail_at: the operation, counted from 0 within each capture, at which captures raise RuntimeError.
    captures: captures that succeeded. attempts: captures begun.
    """

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.fail_at = fail_at
        self.captures = 0
        self.attempts = 0
        self._lock = threading.RLock()
        self._busy = False
        self._capturing = False
        self._graphs: weakref.WeakSet[RecordedGraph] = weakref.WeakSet()

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        with self._lock:
            nested, self._busy = self._busy, True
            try:
                yield not nested
            finally:
                self._busy = nested

    def warm_stream(self) -> nullcontext[None]:
        return nullcontext()

    def new_pool(self) -> object:
        return object()

    def capture(self, fn: Callable[[], Any], pool: Any) -> RecordedGraph:
        self.attempts += 1
        recorder = _Recorder(self.fail_at)
        self._capturing = True
        try:
            with recorder:
                outputs = fn()
        except Exception as error:
            raise CaptureFailedError(error) from error
        finally:
            self._capturing = False
        graph = RecordedGraph(recorder.operations, outputs)
        self._graphs.add(graph)
        self.captures += 1
        return graph

    def join_previous(self) -> None: ...

    def is_capturing(self) -> bool:
        return self._capturing

    def synchronize(self) -> None: ...

    def trim(self) -> None: ...

    def reserved_bytes(self) -> int:
        return sum(graph.nbytes for graph in self._graphs)

    def rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, fail_at: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self._fail_at = fail_at
        self._seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in _FORBIDDEN or _selects_by_mask(name, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if self._seen == self._fail_at:
            raise RuntimeError(f"injected failure at operation {self._seen}: {name}")
        self._seen += 1
        # Aliases, because operations such as `squeeze_` change the shape of the tensor object itself.
        fixed_args, fixed_kwargs = map_tensors((args, kwargs or {}), Tensor.detach)
        value = func(*args, **(kwargs or {}))
        if name not in _ALLOCATIONS:
            # Results that alias an argument live in memory that is fixed already.
            aliased = any(result.alias_info is not None for result in func._schema.returns)
            results = [] if aliased else [result.detach() for result in _tensors(value)]
            self.operations.append(_Operation(func, fixed_args, fixed_kwargs, results))
        return value


def _selects_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Indexing with booleans: the size of the result is known on the device alone."""
    return name == "aten::index" and any(index.dtype == torch.bool for index in _tensors(args[1]))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
