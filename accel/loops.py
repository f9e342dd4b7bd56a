"""Loops over a body `body(carry, step, shared, **constants) -> carry`, and the three ways to capture them.

carry: what a step hands to the next; its structure may change from step to step. step: the inputs of
one step. shared: the inputs of all steps. Each is one value of tensors and hashable constants, e.g. a
dataclass. Every way gives the bits of the plain loop. Source: graph spec section 15, items 1 and 2.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from accel.graphs.backend import GraphBackend
from accel.graphs.buffers import Tokens, clone_layout, distinct_part, storage_address
from accel.graphs.results import Outputs
from accel.graphs.tree import flatten, map_tensors

C = TypeVar("C")
OnStep = Callable[[], None]


class Accelerate(Protocol):
    """Gives a function its accelerated form; `view` hands out the graph's own tensors, uncopied.

    tokens: asked at every call; by name of an argument, what changes whenever its content does. Such an
    argument is copied in only then.
    """

    def __call__(
        self,
        fn: Callable[..., Any],
        *,
        outputs: Outputs = "clone",
        tokens: Callable[[], Tokens] = dict,
    ) -> Callable[..., Any]: ...


def iterate(
    body: Callable[..., C],
    carry: C,
    steps: Sequence[Any],
    shared: Any,
    *,
    on_step: OnStep = lambda: None,
    **constants: Any,
) -> C:
    """The last carry of `for step in steps: carry = body(carry, step, shared, **constants)`.

    on_step: called once per step; where the whole loop is one graph, for all of them at its end. It must
    not write into the loop's tensors, which some ways read less often than others.
    """
    if isinstance(body, BoundLoop):
        last: C = body.iterate(carry, steps, shared, on_step, constants)
        return last
    return _plain(body, carry, steps, shared, on_step, constants)


class BoundLoop(ABC):
    """What a runner puts in the place of a loop body. A call of it is a loop of one step."""

    def __call__(self, carry: C, step: Any, shared: Any, **constants: Any) -> C:
        last: C = self.iterate(carry, (step,), shared, lambda: None, constants)
        return last

    @abstractmethod
    def iterate(
        self, carry: Any, steps: Sequence[Any], shared: Any, on_step: OnStep, constants: Mapping[str, Any]
    ) -> Any:
        """As the function of that name."""


class StepLoop(BoundLoop):
    """Every call of the body is a region call of its own."""

    def __init__(self, body: Callable[..., Any], accelerate: Accelerate) -> None:
        self._step = accelerate(body)

    def iterate(
        self, carry: Any, steps: Sequence[Any], shared: Any, on_step: OnStep, constants: Mapping[str, Any]
    ) -> Any:
        return _plain(self._step, carry, steps, shared, on_step, constants)


class WholeLoop(BoundLoop):
    """All steps are one region call; its signature holds the inputs of every step."""

    def __init__(self, body: Callable[..., Any], accelerate: Accelerate) -> None:
        @functools.wraps(body)  # the body's parameters too: its `step` is the tuple of all steps here
        def loop(carry: Any, steps: tuple[Any, ...], shared: Any, **constants: Any) -> Any:
            return _plain(body, carry, steps, shared, lambda: None, constants)

        self._loop = accelerate(loop)

    def iterate(
        self, carry: Any, steps: Sequence[Any], shared: Any, on_step: OnStep, constants: Mapping[str, Any]
    ) -> Any:
        last = self._loop(carry, tuple(steps), shared, **constants)
        for _ in steps:
            on_step()
        return last


class ChainLoop(BoundLoop):
    """One graph per kind of step, which keeps the carry in the memory it read it from.

    The recording of a step ends with copies of the new carry over the old one, so that the next step
    of its kind finds its carry in place. Between steps of different kinds the carry is copied as any
    other input. `shared` is copied once for each kind. Only the last carry is copied out.
    """

    def __init__(self, body: Callable[..., Any], accelerate: Accelerate, backend: GraphBackend) -> None:
        @functools.wraps(body)
        def step(carry: Any, step: Any, shared: Any, **constants: Any) -> Any:
            new = _apart_from(carry, body(carry, step, shared, **constants))
            # Warm-up and proof want a pure function: the recording alone writes over its carry.
            return _written_over(carry, new, backend.device) if backend.is_capturing() else new

        self._body = body
        # Tells the loops apart: within one, `shared` stays as it is.
        self._run: object | None = None
        self._step = accelerate(step, outputs="view", tokens=lambda: {"shared": self._run or object()})
        self._backend = backend
        self._lock = threading.RLock()  # another thread's steps would go through the same memory

    def iterate(
        self, carry: Any, steps: Sequence[Any], shared: Any, on_step: OnStep, constants: Mapping[str, Any]
    ) -> Any:
        if self._is_in_region():
            return _plain(self._body, carry, steps, shared, on_step, constants)
        with self._lock:
            if self._run is not None:  # called by `on_step`, whose loop has its carry in the same memory
                return _plain(self._body, carry, steps, shared, on_step, constants)
            self._run = object()
            try:
                return _copied(_plain(self._step, carry, steps, shared, on_step, constants))
            finally:
                self._run = None

    def _is_in_region(self) -> bool:
        """Then the steps belong to that region's graph. Takes no lock for longer."""
        with self._backend.exclusive() as outermost:
            return not outermost or self._backend.is_capturing()


def _plain(
    body: Callable[..., C],
    carry: C,
    steps: Sequence[Any],
    shared: Any,
    on_step: OnStep,
    constants: Mapping[str, Any],
) -> C:
    for step in steps:
        carry = body(carry, step, shared, **constants)
        on_step()
    return carry


def _apart_from(carry: Any, new: C) -> C:
    """`new` with copies of what lies in the old carry's memory, e.g. a history that moves on by one."""
    memory: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        if _has_memory(tensor):
            memory.add(storage_address(tensor))
        return tensor

    map_tensors(carry, note)
    return _copied(new, where=lambda tensor: _has_memory(tensor) and storage_address(tensor) in memory)


def _written_over(carry: Any, new: Any, device: torch.device) -> Any:
    """Copy `new` into the tensors of `carry` and return `carry`; if their forms differ, return `new`."""
    old_key, targets = flatten(carry, device=device)
    new_key, sources = flatten(new, device=device)
    if old_key != new_key:
        return new
    torch._foreach_copy_([distinct_part(t) for t in targets], [distinct_part(s) for s in sources])
    return carry


def _has_memory(tensor: Tensor) -> bool:
    """Of its own, that a graph could have written; sparse tensors, for one, run eager."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def _copied(value: C, *, where: Callable[[Tensor], bool] = _has_memory) -> C:
    """The value with copies of some of its tensors; a tensor that occurs twice still does."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = clone_layout(tensor) if where(tensor) else tensor
        return copies[id(tensor)]

    copied: C = map_tensors(value, copy)
    return copied
