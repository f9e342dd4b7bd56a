"""Breaks: calls that run eagerly between two segments of a graph. Source: graph spec section 4.

Mark a function whose work can't be captured, or must stay dynamic, with `@graph_break`, or call one
with `call_break`. Outside a recording both are plain calls. At every replay the function runs again
on the same tensors, whose contents are then new; what it returns must keep structure, shapes, dtypes,
strides and constants, or that call of the region runs eager. Contexts that the region has entered
around a break, autocast aside, are not entered again. A function that is given a tensor to
write into (`out=`) and returns it saves the copy into a fixed buffer. One that only reads its tensors
and keeps none of them, e.g. attention, is best marked `reads_only`: then breaks share memory.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, overload

import torch

from accel.errors import SamebitError

F = TypeVar("F", bound=Callable[..., Any])

_INNER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class Break:
    """Where a segmented graph leaves the device to Python.

    op: the function or operation. file: name without folder. line: 1-based.
    """

    kind: Literal["declared", "automatic"]
    op: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.op} ({self.kind})"


class BreakThreadError(SamebitError):
    """A break of a region that is being captured was called from another thread."""


class Recording(Protocol):
    """What a break needs of the capture that it interrupts."""

    thread: int

    def declared_break(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        reads_only: bool = False,
    ) -> Any:
        """Run `fn` between two segments. reads_only: see `graph_break`."""

    def made(self, value: Any) -> bool:
        """Whether the value holds a tensor that this recording produced."""


_current: ContextVar[Recording | None] = ContextVar("recording", default=None)
_token: ContextVar[object | None] = ContextVar("replay_token", default=None)
_all: list[Recording] = []  # of every thread, for threads that do not inherit the context


@contextmanager
def recording(session: Recording) -> Iterator[None]:
    """Breaks inside the block interrupt `session`."""
    _all.append(session)
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)
        _all.remove(session)


@contextmanager
def inside_break() -> Iterator[None]:
    """Breaks inside the block are part of one that runs already: plain calls."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def one_run() -> Iterator[None]:
    """One recording or replay: `replay_token` gives one object inside the block."""
    token = _token.set(object())
    try:
        yield
    finally:
        _token.reset(token)


def replay_token() -> object:
    """The same object for all breaks of one replay, another one for every replay.

    Key for what breaks build once per run, e.g. the metadata of packed sequences; hold the object
    while the cache is keyed by it. In plain eager code every call gives a new one.
    """
    return _token.get() or object()


def call_break(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, as a break if a segmented graph is being recorded.

    Raises: BreakThreadError in a thread that the region started while it is being recorded.
    """
    return _call_break(fn, args, kwargs, reads_only=False)


def _call_break(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, reads_only: bool
) -> Any:
    session = _current.get()
    if session is not None:
        return session.declared_break(fn, args, kwargs, reads_only=reads_only)
    for other in list(_all):
        if other.thread != threading.get_ident() and other.made((args, kwargs)):
            thread = threading.current_thread().name
            raise BreakThreadError(
                f"graph break '{name_of(fn)}' called in thread '{thread}' on tensors of a region that "
                "another thread is capturing; call it in the thread that runs the region."
            )
    return fn(*args, **kwargs)


@overload
def graph_break(fn: F, /) -> F: ...


@overload
def graph_break(*, when: Callable[..., bool] | None = None, reads_only: bool = False) -> Callable[[F], F]: ...


def graph_break(
    fn: Any = None, /, *, when: Callable[..., bool] | None = None, reads_only: bool = False
) -> Any:
    """Make every call of the decorated function a break.

    when: called with the same arguments; where it returns false, the call is captured like any other.
    reads_only: the function writes into none of its arguments and keeps none of them or of their memory.
    It is given copies in memory that breaks take turns in, instead of holding tensors for every break.
    """
    if fn is None:
        return functools.partial(_breaking, when=when, reads_only=reads_only)
    return _breaking(fn, when=None, reads_only=False)


def _breaking(
    fn: Callable[..., Any], *, when: Callable[..., bool] | None, reads_only: bool
) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if when is not None and not when(*args, **kwargs):
            return fn(*args, **kwargs)
        return _call_break(fn, args, kwargs, reads_only=reads_only)

    return wrapper


def name_of(fn: Callable[..., Any]) -> str:
    """The function's name for reports."""
    return str(getattr(fn, "__qualname__", type(fn).__name__)).rpartition("<locals>.")[2]


def break_here(kind: Literal["declared", "automatic"], op: str) -> Break:
    """A break at the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
    return Break(kind, op, Path(frame.f_code.co_filename).name, frame.f_lineno)
