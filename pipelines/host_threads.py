"""How many CPU threads small host work takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()


@contextmanager
def one_host_thread() -> Iterator[None]:
    """For work of about a millisecond between two stages: waking other threads for it gains little and,
    where the machine is busy, costs tens of milliseconds. Only for work whose bits don't depend on it.

    Threads take turns: a thread that asks for the number the first time is told that of the thread which set
    it last, and would put that back.
    """
    with _lock:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
