"""Regions: the methods of a stage that may be captured.

A region is a pure function of tensors (nested in lists, tuples, dicts or dataclasses) plus
hashable constants. It reads changing data through its arguments alone; module weights are the
only other thing it may touch. Whatever is illegal in a capture (host-to-device copies,
`.item()`, coordinate tables, position ids) the stage prepares before it calls the region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__samebit_region__"


def region(method: F) -> F:
    """Mark a stage method as capturable. Without a runner it stays an ordinary method."""
    setattr(method, _MARK, True)
    return method


def regions_of(stage: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (name, bound method) of every region that the stage's class defines."""
    for name in dir(type(stage)):
        method = getattr(type(stage), name)
        if getattr(method, _MARK, False):
            yield name, method.__get__(stage)
