"""Keeping a capture apart from the rest of the process, and telling what stopped it."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_INNER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


# Python 3.12 begins with a few hundred.
_FROZEN_AT_START = gc.get_freeze_count()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Destroying an old graph is illegal in a capture: nothing made before may be collected inside.

    Frozen as well as disabled, because the region may call `gc.collect` itself. What the application has
    frozen stays so and nothing is added to it, as that would never be freed; the rest is collected first.
    """
    was_enabled, freezes = gc.isenabled(), gc.get_freeze_count() <= _FROZEN_AT_START
    gc.disable()
    if freezes:
        gc.freeze()
    else:
        gc.collect()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def autocast_cache_off() -> Iterator[None]:
    """The cache would keep tensors of the graph's memory for eager code to find."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def describe(error: BaseException) -> str:
    """The source line that raised, where it is, and the first line of the message.

    E.g. "scale = x.max().item() (stage.py:12): CUDA error: operation not permitted ...".
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_INNER)]
    message = lines[0][:200]
    if not frames:
        return message
    last = frames[-1]
    return f"{last.line or last.name} ({Path(last.filename).name}:{last.lineno}): {message}"
