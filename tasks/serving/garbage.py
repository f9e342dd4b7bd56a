"""Python's garbage collector, kept out of requests."""

from __future__ import annotations

import gc


def settle() -> None:
    """After the warm-up: what is alive now is never looked at again, and nothing runs by itself."""
    gc.collect()
    gc.freeze()
    gc.disable()


def rest() -> None:
    """Between requests. Only what came since `settle` is looked at, which takes well under a millisecond."""
    gc.collect()


def restore() -> None:
    """The collector as it is in any Python program."""
    gc.unfreeze()
    gc.enable()
