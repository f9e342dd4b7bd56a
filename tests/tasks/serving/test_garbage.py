"""The collector between requests, and what is left when nobody calls it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tasks.serving import garbage


@pytest.fixture(autouse=True)
def usual_again() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    garbage.restore()
    assert gc.get_threshold() == before
    assert gc.isenabled()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_until_a_rest() -> None:
    garbage.settle()
    node = weakref.ref(Node())
    [Node() for _ in range(2_000)]
    assert node() is not None
    garbage.rest()
    assert node() is None


def test_cycles_of_refused_requests_do_not_pile_up() -> None:
    garbage.settle()
    nodes = [weakref.ref(Node()) for _ in range(200_000)]
    assert sum(node() is not None for node in nodes) < 60_000
