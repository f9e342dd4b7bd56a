"""The collector between requests, and what is left when nobody calls it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from serving_harness import FakePolicy

from tasks.serving import garbage
from tasks.serving.calls import call_from
from tasks.serving.codec import Limits
from tasks.serving.service import REST_AT_LEAST_EVERY, Service


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


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In order: each reply, and each collection between requests."""
    events: list[str] = []
    monkeypatch.setattr(garbage, "rest", lambda: events.append("rest"))
    return events


def converse(events: list[str], exchanges: int, *, beside_another: bool = False) -> None:
    async def exchange(service: Service) -> None:
        with service.exchange():
            body = {"state": np.zeros(1, np.float32)}
            await service.answer(lambda: call_from(body, Limits()), client=None, protocol="test")
            events.append("reply")

    async def run() -> None:
        service = Service(FakePolicy(), queue_size=1)
        await service.warm_up()
        try:
            if beside_another:
                with service.exchange():
                    for _ in range(exchanges):
                        await exchange(service)
            else:
                for _ in range(exchanges):
                    await exchange(service)
        finally:
            service.close()

    asyncio.run(run())


def test_a_reply_does_not_wait_for_the_collector(events: list[str]) -> None:
    converse(events, 3)
    assert events[:4] == ["reply", "rest", "reply", "rest"]


def test_a_server_that_is_never_idle_collects_now_and_then(events: list[str]) -> None:
    converse(events, REST_AT_LEAST_EVERY + 1, beside_another=True)
    assert events[REST_AT_LEAST_EVERY - 1 : REST_AT_LEAST_EVERY + 2] == ["reply", "rest", "reply"]
    assert events.count("rest") == 1
