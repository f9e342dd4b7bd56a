"""Small host work on one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from pipelines.host_threads import one_host_thread


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def in_thread(function) -> list[int]:
    """What it returns in a new thread."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found


def test_what_was_set_comes_back_after_an_error(four_threads: None) -> None:
    def fail() -> None:
        with one_host_thread():
            assert torch.get_num_threads() == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == 4


def test_threads_that_overlap_leave_the_number_as_it_was(four_threads: None) -> None:
    """The second one asks torch for the first time while the first is inside, and leaves after it."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with one_host_thread():
            first_in.set()
            second_in.wait(0.2)
        first_out.set()

    def second() -> None:
        first_in.wait()
        with one_host_thread():
            second_in.set()
            first_out.wait()

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_thread(torch.get_num_threads) == [4]
