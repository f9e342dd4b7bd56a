"""Wall times of calls that take turns on one device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
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


def _wait() -> None:
    """Until the device is idle; a CPU is, when a call returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
