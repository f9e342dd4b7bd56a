"""SIGTERM and SIGHUP as an exception, so that what was begun is put in order before the program ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_NAMES = ("SIGTERM", "SIGHUP")  # Windows lacks the second one


class Terminated(SystemExit):
    """A signal asks to end. Ends the program, and whatever series of jobs it runs.

    number: of the signal. The exit code is 128 + number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"Ended by {signal.Signals(self.number).name}."


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """Raise `Terminated` in the main thread when such a signal comes. Handlers already set are kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise Terminated(number)
