"""Nonsense, bad clients and load, for the benchmark of serving."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
import statistics
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import numpy as np
from serving_overhead import ask, summary
from serving_servers import WAIT_S, Child, observation
from websockets.exceptions import WebSocketException

from tasks.serving.codec import encode

CLIENTS = 8
HALF_OPEN = 20
SLOW_READERS = 4


def nonsense(chance: random.Random) -> bytes:
    """Random bytes, or a small observation with bytes changed, cut or repeated."""
    if chance.random() < 0.3:
        return chance.randbytes(chance.randrange(100))
    image = np.zeros((2, 3, 3), np.uint8)
    data = bytearray(encode({"state": np.zeros(8, np.float32), "images": {"wrist": image}, "prompt": "go"}))
    for _ in range(chance.randrange(1, 6)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    start, end = sorted(chance.choices(range(len(data) + 1), k=2))
    return bytes(data if chance.random() < 0.5 else data[:end] + data[start:])


def malformed(server: Child, count: int) -> dict[str, Any]:
    """Nonsense that must be refused in words; memory after a tenth of it as warm-up."""
    ask(server, 20)
    _refused(server, count // 10)
    ask(server, 20)
    before = server.resident_mib()
    refused = _refused(server, count)
    ask(server, 20)  # the server goes on
    return {"refused": refused, "growth_mib": server.resident_mib() - before}


def _refused(server: Child, count: int) -> int:
    """Half as frames, half as bodies. Returns: how many were refused, which is all, or this raises."""
    chance, refused = random.Random(1), 0
    with server.opened() as connection:
        for _ in range(count // 2):
            connection.send(nonsense(chance))
            message = connection.recv(WAIT_S)
            if not (isinstance(message, str) and message.startswith("invalid: ")):
                raise RuntimeError(f"A malformed frame was answered with {message!r:.200}")
            refused += 1
    kinds = ("application/json", "application/msgpack", "multipart/form-data; boundary=b")
    with httpx.Client(base_url=server.http, timeout=WAIT_S) as client:
        for number in range(count // 2):
            answer = client.post(
                "/v1/actions/generations",
                content=nonsense(chance),
                headers={"content-type": kinds[number % len(kinds)]},
            )
            if answer.status_code != 400:
                raise RuntimeError(f"A malformed body was answered with {answer.text:.200}")
            refused += 1
    return refused


def disconnects(server: Child, count: int) -> dict[str, Any]:
    """Clients that leave in the middle of a frame, a handshake or an inference, half of them with a reset."""
    frame = encode(observation())
    handshake = (
        b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    data = handshake + b"\x82\xff" + struct.pack(">Q", len(frame)) + bytes(4) + frame
    ask(server, 20)
    chance, before = random.Random(2), server.resident_mib()

    def visit(number: int) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as visitor:
            if number % 2:
                visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            visitor.sendall(data[: chance.choice([50, len(handshake) + 9, len(data) // 2, len(data)])])

    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(visit, range(count)))
    gone = time.perf_counter()
    while True:  # while more than max_connections are still being closed, new ones are turned away
        with contextlib.suppress(WebSocketException, OSError):
            after = ask(server, 20)
            break
    return {
        "count": count,
        "back_after_s": time.perf_counter() - gone,
        "p50_ms_after": after["p50"],
        "growth_mib": server.resident_mib() - before,
    }


def bad_neighbours(server: Child) -> dict[str, Any]:
    """Latency of a good client beside sockets that say nothing and clients that read nothing."""
    message = encode(observation())
    alone = ask(server, 50)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(HALF_OPEN)
        ]
        begin = time.perf_counter()
        for _ in range(SLOW_READERS):
            reader = stack.enter_context(server.opened())
            for _ in range(3):
                reader.send(message)
        beside = ask(server, 50)
        for connection in silent:
            connection.settimeout(60)
            assert connection.recv(1) == b""
        closed = time.perf_counter() - begin
    return {"alone": alone, "beside": beside, "silent_closed_after_s": closed}


def fairness(server: Child, seconds: float) -> dict[str, Any]:
    """Clients that all ask as fast as they can while another pings, and one alone before and after.

    Each client is a process of its own, so that what they wait for is the server and not each other.
    """
    before = ask(server, 100)
    with multiprocessing.get_context("fork").Pool(CLIENTS + 1) as processes:
        pinging = processes.apply_async(_pings, (server, seconds))
        latencies = processes.map(partial(_latencies, server), [seconds] * CLIENTS, chunksize=1)
        pings = pinging.get(WAIT_S)
    after = ask(server, 100)
    counts = [len(row) for row in latencies]
    together = summary([value for row in latencies for value in row])
    alone = statistics.median(before["latencies"] + after["latencies"])
    return {
        "clients": CLIENTS,
        "alone_p50": alone,
        "p99_over_fair_share": together["p99"] / (CLIENTS * alone),
        "pings": pings,
        "answers_by_client": counts,
        "least_over_most": min(counts) / max(counts),
        "answers_per_s": sum(counts) / seconds,
        **together,
    }


def _latencies(server: Child, seconds: float) -> list[float]:
    latencies: list[float] = ask(server, seconds=seconds)["latencies"]
    return latencies


def _pings(server: Child, seconds: float) -> dict[str, float]:
    """Milliseconds until a ping is answered on a connection that asks for nothing."""
    times, end = [], time.perf_counter() + seconds
    with server.opened() as connection:
        while (begin := time.perf_counter()) < end:
            if not connection.ping().wait(WAIT_S):
                raise RuntimeError("A ping was not answered.")
            times.append((time.perf_counter() - begin) * 1e3)
            time.sleep(0.02)
    return summary(times)


def growth(server: Child, count: int) -> dict[str, Any]:
    """Resident memory over many requests of one connection, after a tenth of them as warm-up."""
    ask(server, max(count // 10, 1))
    before = server.resident_mib()
    result = ask(server, count)
    del result["latencies"]
    return {"requests": count, "growth_mib": server.resident_mib() - before, **result}
