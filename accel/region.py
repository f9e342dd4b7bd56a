"""Regions and loop bodies: the methods of a stage that may be captured.

A region is a pure function of tensors (nested in lists, tuples, dicts or dataclasses) plus
hashable constants. It reads changing data through its arguments alone; module weights are the
only other thing it may touch. Whatever is illegal in a capture (host-to-device copies,
`.item()`, coordinate tables, position ids) the stage prepares before it calls the region.

A loop body is a region `body(self, carry, step, shared, **constants) -> carry` that
`accel.loops.iterate` calls once for every step, so that several steps may become one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
LoopMode = Literal["step", "chain", "whole"]

_MARK = "__samebit_region__"
_LOOP_MARK = "__samebit_loop__"


class LoopBody(NamedTuple):
    """name: of the method. mode: how its loop is captured where the policy says `auto`."""

    name: str
    method: Callable[..., Any]
    mode: LoopMode


def region(method: F) -> F:
    """Mark a stage method as capturable. Without a runner it stays an ordinary method."""
    setattr(method, _MARK, True)
    return method


def loop_body(mode: LoopMode) -> Callable[[F], F]:
    """Mark a stage method as the body of a loop that is run with `accel.loops.iterate`.

    mode: how the loop is captured unless the policy sets `loop`; see `accel.policy.StagePolicy`.
    """

    def mark(method: F) -> F:
        setattr(method, _LOOP_MARK, mode)
        return method

    return mark


def regions_of(stage: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (name, bound method) of every region that the stage's class defines."""
    for name, method, _ in _marked(stage, _MARK):
        yield name, method


def loop_bodies_of(stage: object) -> Iterator[LoopBody]:
    """Yield every loop body that the stage's class defines."""
    for name, method, mode in _marked(stage, _LOOP_MARK):
        yield LoopBody(name, method, mode)


def _marked(stage: object, mark: str) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    for name in dir(type(stage)):
        method = getattr(type(stage), name)
        value = getattr(method, mark, None)
        if value is not None:
            yield name, method.__get__(stage), value
