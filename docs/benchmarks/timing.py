"""Graphs written by hand, and wall times of calls that take turns on one device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


def in_turn(calls: Mapping[str, Callable[[], Any]], *, rounds: int, warm_ups: int) -> dict[str, list[float]]:
    """ms of every call, the device idle before and after.

    Every round has an order of its own: at the power limit a call is faster after one that left the GPU cool,
    so no call may always follow the same other one.
    """
    walls: dict[str, list[float]] = {name: [] for name in calls}
    order, draw = list(calls), random.Random(0)
    for number in range(-warm_ups, rounds):
        draw.shuffle(order)
        for name in order:
            _wait()
            begin = time.perf_counter()
            calls[name]()
            _wait()
            if number >= 0:
                walls[name].append((time.perf_counter() - begin) * 1e3)
    return walls


@dataclass(frozen=True)
class Captured:
    """A graph written by hand. call: kept, as the graph reads its memory. value: what it returned."""

    call: Callable[[], Any]
    graph: torch.cuda.CUDAGraph
    value: Any

    def replay(self) -> None:
        self.graph.replay()


def captured(call: Callable[[], Any]) -> Captured:
    """A graph of the call, after two runs on a side stream."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = call()
    return Captured(call, graph, value)


def _wait() -> None:
    """Until the device is idle; a CPU is, when a call returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
