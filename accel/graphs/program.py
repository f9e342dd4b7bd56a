"""What a segmented graph replays: segments, and between them eager calls whose results are held to form.

Source: graph spec section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.graphs.backend import CapturedGraph, GraphBackend, RandomState
from accel.graphs.breaks import Break, one_run
from accel.graphs.bridges import BridgeArena
from accel.graphs.buffers import clone_layout, distinct_part, storage_address
from accel.graphs.capture import RunEagerError
from accel.graphs.containment import describe
from accel.graphs.tree import UnsupportedValueError, distinct_tensors, flatten, map_tensors
from accel.measure.trace import named_steps
from accel.record import Reason

# Later failures are reported without their values, so that reports stay bounded.
_DETAILED_FAILURES = 8


class GuardFailedError(Exception):
    """A replay met something else than the recording did."""

    def __init__(self, at: Break | str, difference: str) -> None:
        super().__init__(f"{at}: {difference}")
        self.at = at
        self.difference = difference


# One piece of a replay.
Step = Callable[[], None]


class Call:
    """A function and its arguments as they were: later changes of lists or of a tensor's shape don't show."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn = fn
        self.arguments = map_tensors((args, kwargs), Tensor.detach)
        self.memory = {storage_address(tensor) for tensor in distinct_tensors(self.arguments)}

    def __call__(self) -> Any:
        args, kwargs = map_tensors(self.arguments, _same)
        return self.fn(*args, **kwargs)


class EagerStep:
    """A call that every replay repeats, and the form its result must have.

    own: memory of arguments that the call may write into and return.
    numbers: the result holds no tensors.
    """

    def __init__(
        self,
        at: Break,
        call: Call,
        value: Any,
        *,
        own: Collection[int],
        arena: BridgeArena,
        backend: GraphBackend,
    ) -> None:
        self._at = at
        self._call = call
        self._device = backend.device
        recorded = _Frame.of(value, self._device)
        self._key, self._text = recorded.key, recorded.text
        self._targets: list[_Fixed | _HostCopy] = []
        given: dict[int, Tensor] = {}
        for tensor in recorded.tensors:
            if backend.on_host(tensor):
                self._targets.append(_HostCopy(tensor))
                given[id(tensor)] = tensor
            else:
                fixed = tensor if storage_address(tensor) in own else arena.result(tensor)
                self._targets.append(_Fixed(fixed))
                given[id(tensor)] = fixed
        self._given = map_tensors(value, lambda tensor: given[id(tensor)])
        self.numbers = not self._targets

    def take_given(self) -> Any:
        """What the recording goes on with, once: only the recording's hold on it counts from then on.

        Device tensors are fixed buffers that later segments read, unless the call wrote into its
        arguments' own memory.
        """
        given, self._given = self._given, None
        return given

    def __call__(self) -> None:
        try:
            new = _Frame.of(self._call(), self._device)
        except Exception as error:
            # Eager meets the same, or does better; either way the caller sees what eager gives.
            raise GuardFailedError(self._at, f"raised {type(error).__name__}: {describe(error)}") from None
        if new.key != self._key:
            raise GuardFailedError(self._at, f"value {new.text} vs {self._text}")
        for target, tensor in zip(self._targets, new.tensors, strict=True):
            difference = target.take(tensor)
            if difference:
                raise GuardFailedError(self._at, difference)


class HostInputs:
    """Host tensors outside the graph whose values it contains; they must stay what they were."""

    def __init__(self) -> None:
        self._tensors: dict[Any, tuple[Break, Tensor]] = {}
        self._copies: list[tuple[Break, Tensor, _HostCopy]] = []

    def add(self, at: Break, tensor: Tensor) -> None:
        self._tensors.setdefault((tensor.data_ptr(), *_layout(tensor).values()), (at, tensor.detach()))

    def __len__(self) -> int:
        return len(self._tensors)

    def seal(self) -> None:
        """At the end of the recording: what the region itself wrote is part of the values."""
        self._copies = [(at, tensor, _HostCopy(tensor)) for at, tensor in self._tensors.values()]

    def __call__(self) -> None:
        for at, tensor, copy in self._copies:
            difference = copy.take(tensor)
            if difference:
                raise GuardFailedError(at, difference)


class Upload:
    """A constant from the host, kept on the device: replays restore what later segments may overwrite.

    given: the buffer that the segments use.
    """

    def __init__(self, value: Tensor) -> None:
        self.given = _buffer(value)
        self._target, self._value = self.given.detach(), value

    def __call__(self) -> None:
        self._target.copy_(self._value)


class SegmentedGraph:
    """A recording in segments. Implements `CapturedGraph`.

    breaks: in the order of the recording; equal ones, e.g. of a loop, are kept.
    """

    def __init__(
        self,
        outputs: Any,
        *,
        backend: GraphBackend,
        steps: list[Step],
        segments: list[CapturedGraph],
        breaks: tuple[Break, ...],
    ) -> None:
        self.outputs = outputs
        self.empty = all(segment.empty for segment in segments)
        self.breaks = breaks
        self.runs_python = len(steps) > sum(not segment.empty for segment in segments)
        self._backend = backend
        self._steps = steps
        self._segments = segments
        self._failures = 0

    def replay(self) -> None:
        """Run all steps on the current stream.

        Raises: RunEagerError (guard_failed) with the random state as it was before.
        """
        rng = RandomState.of(self._backend)
        try:
            with torch.no_grad(), one_run():
                for step in named_steps(self._steps, "segment"):
                    step()
        except GuardFailedError as failure:
            rng.restore(self._backend)
            raise RunEagerError(Reason.GUARD_FAILED, self._detail(failure)) from None

    def release(self) -> None:
        self.outputs = None
        self._steps = []
        for segment in self._segments:
            segment.release()
        self._segments = []

    def _detail(self, failure: GuardFailedError) -> str:
        self._failures += 1
        return str(failure) if self._failures <= _DETAILED_FAILURES else f"{failure.at}: another value"


@dataclass(frozen=True)
class _Frame:
    """A result apart from the contents of its tensors. key: equal for equal structure and constants."""

    key: Any
    text: str
    tensors: list[Tensor]

    @classmethod
    def of(cls, value: Any, device: torch.device) -> _Frame:
        """Raises: RunEagerError for results that can't be compared."""
        tensors = distinct_tensors(value)
        numbers: dict[int, Any] = {id(tensor): number for number, tensor in enumerate(tensors)}
        frame = map_tensors(value, lambda tensor: numbers[id(tensor)])
        try:
            return cls(flatten(frame, device=device)[0], repr(frame)[:80], tensors)
        except UnsupportedValueError as error:
            raise RunEagerError(Reason.UNSUPPORTED_OUTPUT, f"result of a break: {error}") from None


class _Fixed:
    """Device memory that the segments know."""

    def __init__(self, given: Tensor) -> None:
        self._memory = given.detach()

    def take(self, new: Tensor) -> str:
        """Bring the new result here; or say how its form differs."""
        difference = _difference(new, self._memory)
        if not difference and new.data_ptr() != self._memory.data_ptr():
            distinct_part(self._memory).copy_(distinct_part(new))
        return difference


class _HostCopy:
    """A host tensor that reached Python, with its values at the time."""

    def __init__(self, given: Tensor) -> None:
        self._copy = given.detach().clone()

    def take(self, new: Tensor) -> str:
        """How the new tensor differs; empty if it doesn't, down to the bit."""
        difference = _difference(new, self._copy, ("shape", "dtype"))
        if not difference and not torch.equal(_bytes(new), _bytes(self._copy)):
            difference = "host values differ" if new.numel() > 1 else f"value {new} vs {self._copy}"
        return difference


def _buffer(tensor: Tensor) -> Tensor:
    """A copy outside the graph's pool, an ordinary tensor even in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return clone_layout(tensor)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _layout(tensor: Tensor) -> dict[str, Any]:
    """Strides of a single element or of nothing address nothing."""
    strides = tensor.stride() if tensor.numel() > 1 else ()
    return {"shape": tuple(tensor.shape), "dtype": tensor.dtype, "stride": strides, "device": tensor.device}


def _difference(
    new: Tensor, old: Tensor, fields: tuple[str, ...] = ("shape", "dtype", "stride", "device")
) -> str:
    ours, theirs = _layout(new), _layout(old)
    return next((f"{f} {ours[f]} vs {theirs[f]}" for f in fields if ours[f] != theirs[f]), "")


def _same(tensor: Tensor) -> Tensor:
    return tensor
