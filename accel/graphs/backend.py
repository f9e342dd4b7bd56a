"""What a graph runner needs of a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from accel.graphs.breaks import Break

# What CUDA says when a capture was invalidated earlier, by something other than the failing call.
_INVALIDATED_BEFORE = "previous error during capture"


class CaptureFailedError(Exception):
    """A capture was undone; nothing of it is left on the device.

    spoiled: another thread broke it, so that a later attempt may succeed.
    """

    def __init__(self, cause: Exception, *, spoiled: bool = False) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.spoiled = spoiled


class CapturedGraph(Protocol):
    """A recording that can be run again on the same memory.

    outputs: what the captured function returned; every replay overwrites its tensors.
    empty: nothing was recorded, a replay does nothing. breaks: where it leaves the device to Python.
    runs_python: a replay calls functions of the region, and may refuse to go on with what they give.
    """

    outputs: Any
    empty: bool
    breaks: tuple[Break, ...]
    runs_python: bool

    def replay(self) -> None:
        """Enqueue the recorded work on the current stream. Raises: RunEagerError if `runs_python`."""

    def release(self) -> None:
        """Destroy the recording. The device must be idle."""


class DeviceLock:
    """Keeps other threads out. Entering gives whether this thread was not inside already.

    A class rather than a generator: every call of a region goes through it before its launch.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        return self._depth == 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()


class GraphBackend(Protocol):
    """Capture and replay on one device."""

    device: torch.device

    def exclusive(self) -> AbstractContextManager[bool]:
        """Keep other threads of this device out. Gives False inside another `exclusive` block."""

    def warm_stream(self) -> AbstractContextManager[None]:
        """Make the long-lived capture stream current, ordered after and before the caller's stream."""

    def new_pool(self) -> Any:
        """A memory pool that the graphs of one region share. Each new one starts without graphs."""

    def capture(self, fn: Callable[[], Any], pool: Any) -> CapturedGraph:
        """Record `fn` inside `warm_stream`; nothing of it runs.

        Raises: CaptureFailedError after undoing the attempt; torch.OutOfMemoryError likewise.
        """

    def begin(self, pool: Any) -> None:
        """Start recording on the capture stream, inside `warm_stream`. `end` or `abort` must follow.

        The pool lives while one graph does that was recorded into it, be it an empty one.
        """

    def end(self) -> CapturedGraph:
        """Stop recording. The graph has no outputs yet; nothing of it has run."""

    def abort(self) -> None:
        """Undo the recording that `begin` started, however far it came; nothing to do if there is none.

        Raises: what the device raises if it is lost.
        """

    def on_capture_stream(self) -> bool:
        """Whether the current stream is the one that `begin` records."""

    def on_host(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in host memory, which no graph reads or writes."""

    def asks_for_host(self, options: Mapping[str, Any]) -> bool | None:
        """Whether an operation with these keyword arguments makes a host tensor; `None` if they don't say."""

    def join_previous(self) -> None:
        """Order the current stream after the stream of the previous call."""

    def is_capturing(self) -> bool:
        """Whether the current stream is recording, for whomever."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def trim(self) -> None:
        """Wait, then give cached free memory back to the device."""

    def reserved_bytes(self) -> int:
        """Device memory held by this process."""

    def rng_state(self) -> Tensor:
        """State of the device's default generator."""

    def set_rng_state(self, state: Tensor) -> None: ...


class RandomState(NamedTuple):
    """Of the default generators of the device and of the host: what runs as eager may draw from both."""

    device: Tensor
    host: Tensor

    @classmethod
    def of(cls, backend: GraphBackend) -> RandomState:
        return cls(backend.rng_state(), torch.get_rng_state())

    def restore(self, backend: GraphBackend) -> None:
        backend.set_rng_state(self.device)
        torch.set_rng_state(self.host)

    def equals(self, other: RandomState) -> bool:
        return all(map(torch.equal, self, other))


def capture_whole(backend: GraphBackend, fn: Callable[[], Any], pool: Any) -> CapturedGraph:
    """`GraphBackend.capture` in terms of `begin`, `end` and `abort`."""
    try:
        backend.begin(pool)
        outputs = fn()
        graph = backend.end()
    except BaseException as error:
        backend.abort()
        raise_capture_failure(error)
    graph.outputs = outputs
    return graph


def raise_capture_failure(error: BaseException) -> NoReturn:
    """Raise what ended a recording: a CaptureFailedError, or `error` itself if it is more than that."""
    if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
        raise error
    raise CaptureFailedError(error, spoiled=_INVALIDATED_BEFORE in str(error)) from error
