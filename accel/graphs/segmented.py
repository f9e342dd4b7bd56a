"""Recording a region in segments: at a break the capture is closed, code runs eagerly, capture reopens.

Source: graph spec sections 4, 5.2, 6 and 7.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from accel.graphs.automatic import Args, ConstructorMode, Kwargs, OperationMode
from accel.graphs.backend import CapturedGraph, GraphBackend, raise_capture_failure
from accel.graphs.breaks import Break, break_here, inside_break, name_of, one_run, recording
from accel.graphs.bridges import BridgeArena
from accel.graphs.buffers import storage_address
from accel.graphs.capture import RunEagerError
from accel.graphs.program import Call, EagerStep, HostInputs, SegmentedGraph, Step, Upload
from accel.graphs.tree import distinct_tensors
from accel.record import Reason


class SegmentedRecorder:
    """Records functions in segments; what can't be captured becomes a break.

    max_segments: captured segments allowed in one graph. name: the region's, for messages.
    """

    def __init__(self, backend: GraphBackend, *, max_segments: int, name: str) -> None:
        self._backend = backend
        self._max_segments = max_segments
        self._name = name

    def __call__(self, fn: Callable[[], Any], pool: Any) -> SegmentedGraph:
        """Run `fn` once, inside `warm_stream`, and keep what it did.

        A segment is launched when a break follows, which then sees true values; the last one is not.
        Raises: RunEagerError (too_many_segments, break_in_side_stream, unsupported_output,
        capture_failed); CaptureFailedError; torch.OutOfMemoryError. Nothing of the attempt is left.
        """
        session = _Session(self._backend, pool, max_segments=self._max_segments, name=self._name)
        try:
            outputs = session.record(fn)
        except BaseException as error:
            session.undo()
            if isinstance(error, RunEagerError):
                raise
            raise_capture_failure(error)
        return SegmentedGraph(
            outputs,
            backend=self._backend,
            steps=session.steps,
            segments=session.segments,
            breaks=tuple(session.breaks),
        )


class _Session:
    """One recording. Implements `breaks.Recording` and `automatic.Session`.

    segments: all of them; empty ones are no steps, but the first may be what keeps the pool alive.
    """

    def __init__(self, backend: GraphBackend, pool: Any, *, max_segments: int, name: str) -> None:
        self.thread = threading.get_ident()
        self.active = False
        self.steps: list[Step] = []
        self.segments: list[CapturedGraph] = []
        self.breaks: list[Break] = []
        self._backend = backend
        self._pool = pool
        self._max_segments = max_segments
        self._name = name
        self._autocast = _autocast(backend.device)
        self._host_inputs = HostInputs()
        self._arena = BridgeArena(on_host=backend.on_host)
        self._made: set[int] = set()
        self._guards: dict[Any, Any] = {}  # values read since the last captured operation
        self._failure: BaseException | None = None

    def record(self, fn: Callable[[], Any]) -> Any:
        """Run `fn`; return its outputs."""
        operations, constructors = (mode(self, self._backend) for mode in (OperationMode, ConstructorMode))
        with recording(self), one_run(), operations, constructors:
            self._open()
            outputs = fn()
            if self._failure is not None:  # the region caught what was not meant for it
                raise self._failure
            self._close()
        if self._host_inputs:
            self._host_inputs.seal()
            self.steps.insert(0, self._host_inputs)
        return outputs

    def undo(self) -> None:
        """Destroy what was recorded. Raises: what the device raises if it is lost."""
        self._backend.abort()
        self._backend.synchronize()
        for segment in self.segments:
            segment.release()

    def declared_break(
        self, fn: Callable[..., Any], args: Args, kwargs: Kwargs, *, reads_only: bool = False
    ) -> Any:
        at = break_here("declared", name_of(fn))
        autocast = _autocast(self._backend.device)
        body = fn if autocast == self._autocast else _under(autocast, self._backend.device, fn)
        if not reads_only:
            return self.eager(at, body, args, kwargs)
        args, kwargs = self._arena.stage((args, kwargs))
        staged = [tensor for tensor in distinct_tensors((args, kwargs)) if not tensor.is_inference()]
        before = [tensor._version for tensor in staged]
        given = self.eager(at, body, args, kwargs, borrowed=True)
        if before != [tensor._version for tensor in staged]:
            self.refuse(Reason.CAPTURE_FAILED, f"{at}: declared reads_only, but writes into an argument")
        return given

    def eager(
        self,
        at: Break,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any = None,
        *,
        borrowed: bool = False,
    ) -> Any:
        """Run a call between two segments, now and at every replay.

        key: equal for calls that give equal values as long as nothing runs in between. borrowed: the
        arguments' memory is lent for this call, so that no result may stay there.
        """
        with self._interrupted(at):
            if key is not None and key in self._guards:
                return self._guards[key]
            call = Call(fn, args, kwargs)
            own = frozenset() if borrowed else call.memory
            value = fn(*args, **kwargs)
            step = EagerStep(at, call, value, own=own, arena=self._arena, backend=self._backend)
            self._add(at, step)
            given = step.take_given()
            if step.numbers and key is not None:
                self._guards[key] = given
            else:
                self._guards.clear()
            return given

    def upload(self, at: Break, make: Callable[[], Tensor]) -> Tensor:
        """A device tensor with a value from the host, the same at every replay."""
        with self._interrupted(at):
            step = Upload(make())
            self._add(at, step)
            return step.given

    def host_inputs(self, at: Break, tensors: list[Tensor]) -> None:
        """Host tensors whose values go into the recording."""
        for tensor in tensors:
            self._host_inputs.add(at, tensor)

    def refuse(self, reason: Reason, detail: str) -> NoReturn:
        """End the recording, even if the region catches the error."""
        self.active = False
        self._failure = RunEagerError(reason, detail)
        raise self._failure

    def note_made(self, value: Any) -> None:
        self._made.update(storage_address(tensor) for tensor in distinct_tensors(value))

    def made(self, value: Any) -> bool:
        return any(storage_address(tensor) in self._made for tensor in distinct_tensors(value))

    @contextmanager
    def _interrupted(self, at: Break) -> Iterator[None]:
        """Close the segment and run it; reopen at the end."""
        try:
            if not self._backend.on_capture_stream():
                raise RunEagerError(Reason.BREAK_IN_SIDE_STREAM, f"{at}: join the side stream first")
            self._close().replay()
            with inside_break():
                yield
            self._backend.synchronize()  # work left on side streams would fall into the next segment
            self._open()
        except BaseException as error:
            self.active = False
            self._failure = error
            raise

    def _open(self) -> None:
        self._backend.begin(self._pool)
        self.active = True

    def _close(self) -> CapturedGraph:
        """End the segment, and keep it if it did anything."""
        self.active = False
        segment = self._backend.end()
        self.segments.append(segment)
        if not segment.empty:
            self._guards.clear()
            self._require_room()
            self.steps.append(segment.replay)
        return segment

    def _require_room(self) -> None:
        if sum(not segment.empty for segment in self.segments) > self._max_segments:
            last = f"; the last break is {self.breaks[-1]}" if self.breaks else ""
            detail = f"{self._name}: more than max_segments={self._max_segments}{last}"
            raise RunEagerError(Reason.TOO_MANY_SEGMENTS, detail)

    def _add(self, at: Break, step: Step) -> None:
        self.steps.append(step)
        self.breaks.append(at)


def _autocast(device: torch.device) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def _under(
    autocast: tuple[bool, torch.dtype], device: torch.device, fn: Callable[..., Any]
) -> Callable[..., Any]:
    """`fn` with the autocast state that the region had set around it."""
    enabled, dtype = autocast

    def body(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
            return fn(*args, **kwargs)

    return body
