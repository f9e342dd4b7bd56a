"""Python's garbage collector, kept out of requests."""

from __future__ import annotations

import gc

# New objects after which a collection starts by itself. A rest comes long before that, unless the worker is
# at one job for long while refused requests, whose tracebacks are cycles, pile up.
_BOUND = 50_000
_usual = gc.get_threshold()


def settle() -> None:
    """After the warm-up: what is alive now is never looked at again, and collections wait for `rest`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_BOUND, *_usual[1:])


def rest() -> None:
    """Between requests. Only what came since `settle` is looked at, which takes well under a millisecond."""
    gc.collect()


def restore() -> None:
    """The collector as it is in any Python program."""
    gc.unfreeze()
    gc.set_threshold(*_usual)
