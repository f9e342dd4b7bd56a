"""Nonsense over real sockets: every message gets one answer, and the server goes on."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from serving_harness import WAIT_S, FakePolicy, Running, serving
from websockets.sync.client import connect

from tasks.serving import connections
from tasks.serving.codec import Limits, decode, encode

GOOD = encode({"state": np.array([1], np.float32), "images": {"wrist": np.zeros((4, 4, 3), np.uint8)}})
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)
PROBE = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(FakePolicy(), max_body_mib=1, max_connections=32) as running:
        yield running


def nonsense(chance: random.Random) -> bytes:
    """Random bytes, or a good message with bytes changed, cut or repeated."""
    if chance.random() < 0.3:
        return chance.randbytes(chance.randrange(60))
    data = bytearray(GOOD)
    for _ in range(chance.randrange(1, 5)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    start, end = sorted(chance.choices(range(len(data) + 1), k=2))
    return bytes(data if chance.random() < 0.6 else data[:end] + data[start:])


def assert_serves(server: Running) -> None:
    with connect(server.ws) as connection:
        connection.recv(WAIT_S)
        connection.send(GOOD)
        assert decode(connection.recv(WAIT_S), Limits())["actions"][0, 0] == 1
    assert server.get("/readyz").status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/actions/realtime"])
def test_malformed_frames(server: Running, path: str) -> None:
    chance = random.Random(1)
    refused = 0
    with connect(server.ws + path, compression=None) as connection:
        if path == "/":
            connection.recv(WAIT_S)
        for _ in range(1000):
            connection.send(nonsense(chance))
            answer = connection.recv(WAIT_S)
            if isinstance(answer, str):
                assert answer.startswith("invalid: "), answer
                refused += 1
            else:
                assert "server_timing" in decode(answer, Limits())
    assert refused > 700
    assert_serves(server)


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/msgpack", "multipart/form-data; boundary=b", "x/y"]
)
def test_malformed_bodies(server: Running, content_type: str) -> None:
    chance = random.Random(2)
    with httpx.Client(base_url=server.http, timeout=WAIT_S) as client:
        for _ in range(250):
            answer = client.post(
                "/v1/actions/generations",
                content=nonsense(chance),
                headers={"content-type": content_type},
            )
            assert answer.status_code in (200, 400, 415), answer.text
    assert_serves(server)


def test_abrupt_ends_in_the_middle_of_everything(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    post = b"POST /v1/actions/generations HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{"
    frame = b"\x82" + bytes([0x80 | 0x7E]) + struct.pack(">H", len(GOOD)) + bytes(4) + GOOD
    chance = random.Random(3)

    def visit(number: int) -> None:
        data = chance.choice(
            [HANDSHAKE + frame, post, HANDSHAKE + chance.randbytes(40), chance.randbytes(40)]
        )
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as visitor:
            if number % 2:  # leave with a reset instead of a polite end
                visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            visitor.sendall(data[: chance.randrange(1, len(data) + 1)])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(visit, range(200)))
    server.waits_for(lambda: server.service._exchanges == 0)
    assert_serves(server)
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@contextlib.contextmanager
def unread(server: Running, hello: bytes) -> Iterator[socket.socket]:
    """A connection whose client reads the first of its answer and no more."""
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as connection:
        connection.sendall(hello)
        assert connection.recv(1)
        yield connection


@pytest.mark.parametrize(
    ("hello", "again"),
    [
        (HANDSHAKE, b"\x82\x89" + bytes(4) + encode({"state": [1]})),
        (PROBE, PROBE.replace(b"healthz", b"metrics")),
    ],
    ids=["frames", "requests"],
)
def test_who_reads_no_answer_is_cut_off(hello: bytes, again: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_TIMEOUT_S", 0.2)

    def send_for_ever(connection: socket.socket) -> None:
        while True:
            connection.sendall(again * 1000)

    with serving(FakePolicy()) as server, unread(server, hello) as connection:
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_for_ever(connection)
        assert_serves(server)


def test_pongs_that_nobody_reads_do_not_pile_up(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_TIMEOUT_S", WAIT_S)
    pings = (b"\x89\xfd" + bytes(4) + bytes(125)) * 1000
    tracemalloc.start()
    try:
        with unread(server, HANDSHAKE) as connection:
            for _ in range(120):
                connection.sendall(pings)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
