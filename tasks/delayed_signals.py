"""What has been measured is written before Ctrl-C or a signal ends the program."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows lacks the last one


@contextlib.contextmanager
def delaying_signals() -> Iterator[None]:
    """The first signal that comes acts when the body has ended; the second one acts at once.

    Signals that no Python function handles, and other threads than the main one, are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if waiting:
            waiting.clear()
            handlers[number](number, frame)
        else:
            waiting.append(number)

    for number in handlers:
        signal.signal(number, wait)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in waiting:
            handlers[number](number, None)
