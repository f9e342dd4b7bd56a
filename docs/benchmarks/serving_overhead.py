"""What a server costs beyond the pipeline that it serves, and where that time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from openpi_client.msgpack_numpy import Packer
from serving_servers import ECHO_PATH, WAIT_S, Child, observation

from tasks.serving.codec import Limits, decode, encode
from tasks.serving.policy import Parameters, Policy

BLOCK = 10
"""Requests in a row of one kind before it is the other kind's turn."""


def overhead(server: Child, policy: Policy, requests: int) -> dict[str, Any]:
    """A client's whole wait less the time of the same call in its own process.

    policy: like the server's, warm. Both take the same raw arrays and check them; the server's client packs
    them, sends them and unpacks the answer. They take turns, A B B A; the overhead of a round is the mean of
    its two medians A less that of its two medians B.
    Raises: RuntimeError if their actions differ in a bit.
    """
    raw, rounds = observation(), max(1, requests // (2 * BLOCK))
    served, direct, differences = [], [], []
    with server.opened() as connection:

        def through_server() -> Any:
            connection.send(encode(raw))
            answer = connection.recv(WAIT_S)
            assert isinstance(answer, bytes), answer
            return decode(answer, Limits())["actions"]

        def in_process() -> Any:
            return policy.infer(policy.prepare(raw, Parameters())).actions

        for _ in range(3):
            if not np.array_equal(through_server(), in_process()):
                raise RuntimeError("Served actions differ from those of the call in process.")
        for _ in range(rounds):
            a, b = timed(through_server), timed(in_process)
            b2, a2 = timed(in_process), timed(through_server)
            served += a + a2
            direct += b + b2
            pairs = statistics.median(a) + statistics.median(a2), statistics.median(b) + statistics.median(b2)
            differences.append((pairs[0] - pairs[1]) / 2)
    return {"served": summary(served), "in_process": summary(direct), "overhead": summary(differences)}


def split(server: Child, requests: int) -> dict[str, Any]:
    """Parts of the overhead, each by itself: packing, and a frame answered by the same stack unread."""
    raw, packer = observation(), Packer()
    frame = encode(raw)
    with server.opened(ECHO_PATH) as connection:

        def echo() -> None:
            connection.send(frame)
            connection.recv(WAIT_S)

        return {
            "packing": summary(timed(lambda: encode(raw), requests)),
            "packing_openpi": summary(timed(lambda: packer.pack(raw), requests)),
            "network": summary(timed(echo, requests)),
            "decoding": summary(timed(lambda: decode(frame, Limits()), requests)),
        }


def ask(server: Child, count: int = 0, *, seconds: float = 0.0) -> dict[str, Any]:
    """Send a three-camera observation `count` times, or for so long; a client's whole waits in ms."""
    message = observation()
    latencies: list[float] = []
    end = time.perf_counter() + seconds
    with server.opened() as connection:
        while len(latencies) < count or time.perf_counter() < end:
            begin = time.perf_counter()
            connection.send(encode(message))
            answer = connection.recv(WAIT_S)
            assert isinstance(answer, bytes), answer
            decode(answer, Limits())
            latencies.append((time.perf_counter() - begin) * 1e3)
    return {**summary(latencies), "latencies": latencies}


def timed(work: Callable[[], object], count: int = BLOCK) -> list[float]:
    """Milliseconds of each of `count` calls."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def summary(values: list[float]) -> dict[str, float]:
    """jitter: mean difference between neighbours."""
    return {
        "p50": statistics.median(values),
        "p99": float(np.percentile(values, 99)),
        "max": max(values),
        "jitter": float(np.abs(np.diff(values)).mean()) if len(values) > 1 else 0.0,
    }
