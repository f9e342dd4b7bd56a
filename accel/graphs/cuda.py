"""CUDA graphs through `torch.cuda.CUDAGraph`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from accel.graphs.backend import CapturedGraph, DeviceLock, capture_whole
from accel.graphs.breaks import Break

# What torch warns of when a graph without nodes is ended; it has no other way to ask.
_EMPTY = "CUDA Graph is empty"


class _Lane:
    """What all graphs of one device share: a lock, the capture stream, the stream last replayed on.

    One stream for good: library workspaces belong to it, and captures on it never run at once.
    """

    def __init__(self, index: int) -> None:
        self.lock = DeviceLock()
        self.index = index
        self.side = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        self.last: torch.cuda.Stream | None = None


@functools.cache
def _lane(index: int) -> _Lane:
    return _Lane(index)


class CudaGraph:
    """One instantiated CUDA graph; `outputs` is set by whoever recorded it."""

    breaks: tuple[Break, ...] = ()
    runs_python = False

    def __init__(self, graph: torch.cuda.CUDAGraph, *, empty: bool) -> None:
        self.outputs: Any = None
        self.empty = empty
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        self.outputs = None
        self._graph.reset()


def _settle_attention_priority(device: torch.device) -> None:
    """The first attention call of a process may reorder the kernels that later calls prefer.

    The order is part of every signature, so it must not change between two calls of a region.
    """
    row = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    torch.nn.functional.scaled_dot_product_attention(row, row, row)


def _ends_empty(graph: torch.cuda.CUDAGraph) -> bool:
    """End the capture; tell whether it has no nodes, and keep torch from warning of that."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.capture_end()
    return any(_EMPTY in str(warning.message) for warning in caught)


class CudaBackend:
    """The graph backend of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._lane = _lane(index)
        self._open: tuple[torch.cuda.CUDAGraph, Any] | None = None
        _settle_attention_priority(self.device)

    def exclusive(self) -> DeviceLock:
        return self._lane.lock

    @contextmanager
    def warm_stream(self) -> Iterator[None]:
        caller, side = torch.cuda.current_stream(self.device), self._lane.side
        side.wait_stream(caller)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            caller.wait_stream(self._lane.side)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, fn: Callable[[], Any], pool: Any) -> CapturedGraph:
        return capture_whole(self, fn, pool)

    def begin(self, pool: Any) -> None:
        # Every recording allocates its library workspaces in its own pool, where neither destroying
        # another graph nor code that runs between two segments can take them away.
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        self._open = graph, pool
        # Thread-local: allocations and queries of other threads are none of this capture's business.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def end(self) -> CudaGraph:
        assert self._open is not None
        graph, _ = self._open
        empty = _ends_empty(graph)
        self._open = None
        torch._C._cuda_clearCublasWorkspaces()
        return CudaGraph(graph, empty=empty)

    def abort(self) -> None:
        if self._open is not None:
            (graph, pool), self._open = self._open, None
            try:
                self._undo(graph, pool)
            finally:
                torch._C._cuda_clearCublasWorkspaces()

    def on_capture_stream(self) -> bool:
        return bool(torch.cuda.current_stream(self.device) == self._lane.side)

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def asks_for_host(self, options: Mapping[str, Any]) -> bool | None:
        device = options.get("device")
        return None if device is None else torch.device(device).type == "cpu"

    def join_previous(self) -> None:
        last = self._lane.last
        if last is not None and last.cuda_stream == torch._C._cuda_getCurrentRawStream(self._lane.index):
            return  # told by the raw handles: objects for streams are slow to make
        current = torch.cuda.current_stream(self.device)
        if last is not None:
            current.wait_stream(last)
        self._lane.last = current

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def trim(self) -> None:
        self.synchronize()
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def _undo(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a broken capture, give its memory back and leave stream and generator usable.

        Raises: what CUDA raises if the device is lost.
        """
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            graph.reset()
        with suppress(RuntimeError):
            # Releases of torch that leave the pool open after a failed capture never free it;
            # where it is closed already, the first call raises and nothing is released twice.
            torch._C._cuda_endAllocateToPool(self._lane.index, pool)
            torch._C._cuda_releasePool(self._lane.index, pool)
        try:
            self._capture_nothing()
        except RuntimeError:
            self._lane.side = torch.cuda.Stream(self._lane.index)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._lane.side):
                self._capture_nothing()

    def _capture_nothing(self) -> None:
        """A capture that succeeds takes the default generator out of capture mode and proves the stream."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=self.device)
        graph.capture_end()
        self.synchronize()
        graph.reset()
