"""OpenPI over real sockets: the stock client, many clients, clients that leave, and errors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from serving_harness import WAIT_S, FakePolicy, Running, serving
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from accel.errors import ConfigError
from tasks.serving.codec import Limits, decode, encode
from tasks.serving.replay import connected

# The stock client uses a form of `connect` that its library no longer recommends.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")

TIMING = {
    "preprocess_ms",
    "queue_ms",
    "infer_ms",
    "text_ms",
    "observation_ms",
    "denoise_ms",
    "postprocess_ms",
}


def stock(server: Running, path: str = "") -> WebsocketClientPolicy:
    return WebsocketClientPolicy(server.ws + path)


@contextlib.contextmanager
def opened(server: Running, path: str = "") -> Iterator[ClientConnection]:
    """A connection after its greeting, if there is one."""
    with connect(server.ws + path, compression=None) as connection:
        if path != "/v1/actions/realtime":
            connection.recv(WAIT_S)
        yield connection


def state(value: float) -> dict[str, Any]:
    return {"state": np.array([value], np.float32)}


class Gate:
    """Holds the inference of one state until it is let go."""

    def __init__(self, held: float) -> None:
        self._held = held
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, value: float) -> None:
        if value == self._held:
            self.reached.set()
            assert self.open.wait(WAIT_S)


@pytest.mark.parametrize("path", ["", "/openpi/policy"])
def test_the_stock_client_works_as_it_is(path: str) -> None:
    policy = FakePolicy()
    with serving(policy) as server:
        client = stock(server, path)
        assert client.get_server_metadata() == policy.metadata
        for number in range(3):
            answer = client.infer({**state(number), "request_id": f"r{number}"})
            assert answer["actions"].dtype == np.float32
            assert np.array_equal(answer["actions"], np.full((2, 7), number))
            assert answer["request_id"] == f"r{number}"
            expected = TIMING | ({"prev_total_ms"} if number else set())
            assert set(answer["server_timing"]) == expected
            assert all(value >= 0 for value in answer["server_timing"].values())


def test_a_bad_observation_raises_in_the_stock_client_and_keeps_the_connection() -> None:
    with serving(FakePolicy()) as server:
        client = stock(server)
        with pytest.raises(RuntimeError, match=r"invalid: state: missing; send 1 numbers$"):
            client.infer({"prompt": "go"})
        assert client.infer(state(4))["actions"][0, 0] == 4


def test_robolab_dialect() -> None:
    with serving(FakePolicy()) as server:
        answer = stock(server).infer(
            {"observation/joint_position": np.full(7, 3.0), "observation/gripper_position": 0.0}
        )
        assert np.array_equal(answer["action"], np.full((2, 7), 3))
        assert set(answer["server_timing"]) == TIMING
        assert "actions" not in answer


def test_realtime_has_no_greeting_and_answers_with_envelopes() -> None:
    with serving(FakePolicy()) as server, opened(server, "/v1/actions/realtime") as connection:
        connection.send(encode({"id": "a", "input": state(2)}))
        envelope = decode(connection.recv(WAIT_S), Limits())
        assert (envelope["id"], envelope["object"]) == ("a", "action.generation")
        assert np.array_equal(envelope["data"][0]["action"]["values"], np.full((2, 7), 2))
        connection.send(
            encode({"input": state(3), "runtime": {"response_format": "raw", "output_format": "list"}})
        )
        assert decode(connection.recv(WAIT_S), Limits())["actions"] == [[3.0] * 7] * 2


def test_slow_inference_blocks_nobody_else() -> None:
    """Case C21."""
    gate = Gate(held=1)
    policy = FakePolicy(during=gate)
    with serving(policy) as server, connect(server.ws, ping_interval=0.2, ping_timeout=WAIT_S) as a:
        a.recv(WAIT_S)
        a.send(encode(state(1)))
        assert gate.reached.wait(WAIT_S)
        with connect(server.ws, open_timeout=WAIT_S) as b:
            assert decode(b.recv(WAIT_S), Limits()) == policy.metadata
            assert server.get("/healthz").status_code == 200
            assert a.ping().wait(WAIT_S)
            assert b.ping().wait(WAIT_S)
            b.send(encode(state(2)))
            with opened(server) as c:
                c.send(encode(state(9)))
                server.waits_for(lambda: server.service._scheduler.waiting == 2)
            server.waits_for(lambda: server.service._scheduler.waiting == 1)
            gate.open.set()
            for connection, expected in ((a, 1), (b, 2)):
                assert decode(connection.recv(WAIT_S), Limits())["actions"][0, 0] == expected
        a.send(encode(state(3)))
        assert decode(a.recv(WAIT_S), Limits())["actions"][0, 0] == 3
    assert policy.inferred == [1, 2, 3]


def test_many_clients_get_their_own_answers_in_turn() -> None:
    policy = FakePolicy()
    with serving(policy) as server, ThreadPoolExecutor(8) as threads:

        def converse(number: int) -> list[float]:
            client = stock(server)
            return [float(client.infer(state(100 * number + i))["actions"][1, 6]) for i in range(20)]

        answers = list(threads.map(converse, range(8)))
        assert answers == [[100 * number + i for i in range(20)] for number in range(8)]


def test_replies_keep_the_order_of_messages_sent_ahead() -> None:
    with serving(FakePolicy()) as server, opened(server) as connection:
        for number in range(10):
            connection.send(encode(state(number)) if number % 3 else b"\xc1")
        received = [connection.recv(WAIT_S) for _ in range(10)]
        assert [isinstance(message, str) for message in received] == [number % 3 == 0 for number in range(10)]
        answers = [decode(m, Limits())["actions"][0, 0] for m in received if isinstance(m, bytes)]
        assert answers == [1, 2, 4, 5, 7, 8]


def test_latest_wins_answers_the_older_observation_with_an_error() -> None:
    gate = Gate(held=1)
    with serving(FakePolicy(during=gate), latest_wins=True) as server, opened(server) as connection:
        connection.send(encode(state(1)))
        assert gate.reached.wait(WAIT_S)
        connection.send(encode(state(2)))
        server.waits_for(lambda: server.service._scheduler.waiting == 1)
        gate.open.set()
        assert str(connection.recv(WAIT_S)).startswith("superseded: ")
        assert decode(connection.recv(WAIT_S), Limits())["actions"][0, 0] == 2


def test_a_full_queue_answers_busy() -> None:
    gate = Gate(held=1)
    with (
        serving(FakePolicy(during=gate), queue_size=1) as server,
        opened(server) as a,
        opened(server) as b,
        opened(server) as c,
    ):
        a.send(encode(state(1)))
        assert gate.reached.wait(WAIT_S)
        b.send(encode(state(2)))
        server.waits_for(lambda: server.service._scheduler.waiting == 1)
        c.send(encode(state(3)))
        assert str(c.recv(WAIT_S)).startswith("busy: 1 requests wait")
        gate.open.set()
        for connection, expected in ((a, 1), (b, 2)):
            assert decode(connection.recv(WAIT_S), Limits())["actions"][0, 0] == expected


def test_an_expired_request_is_answered_and_not_computed() -> None:
    gate = Gate(held=1)
    policy = FakePolicy(during=gate)
    with serving(policy) as server, opened(server) as a, opened(server) as b:
        a.send(encode(state(1)))
        assert gate.reached.wait(WAIT_S)
        b.send(encode({**state(2), "runtime": {"deadline_ms": 5}}))
        assert str(b.recv(WAIT_S)).startswith("expired: ")
        gate.open.set()
        assert decode(a.recv(WAIT_S), Limits())["actions"][0, 0] == 1
    assert policy.inferred == [1]


def test_a_chunk_is_not_delivered_after_the_servers_deadline() -> None:
    gate = Gate(held=1)
    with serving(FakePolicy(during=gate), deadline_ms=20.0) as server, opened(server) as connection:
        connection.send(encode(state(1)))
        assert str(connection.recv(WAIT_S)).startswith("expired: ")
        gate.open.set()
        connection.send(encode({**state(2), "runtime": {"deadline_ms": 1e3 * WAIT_S}}))
        assert decode(connection.recv(WAIT_S), Limits())["actions"][0, 0] == 2


def fail(state: float) -> None:
    raise RuntimeError("secret /home/robot/weights")


@pytest.mark.parametrize("during", [fail, lambda state: None], ids=["raises", "not_finite"])
def test_faults_close_with_1011_and_tell_nothing(during: Callable[[float], None]) -> None:
    with serving(FakePolicy(during=during)) as server, opened(server) as connection:
        connection.send(encode(state(1 if during is fail else float("inf"))))
        told = connection.recv(WAIT_S)
        assert isinstance(told, str)
        assert told.startswith("fault: ")
        assert "secret" not in told
        assert "/" not in told
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(WAIT_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        assert server.get("/readyz").status_code == 200


def test_text_and_oversized_messages() -> None:
    with serving(FakePolicy(), max_body_mib=1) as server:
        with opened(server) as connection:
            connection.send("hello")
            assert str(connection.recv(WAIT_S)).startswith("invalid: message: text")
            connection.send(encode(state(1)))
            assert decode(connection.recv(WAIT_S), Limits())["actions"][0, 0] == 1
        with opened(server) as connection:
            with contextlib.suppress(ConnectionClosed):  # already while it is sent, or after
                connection.send(bytes(2**20 + 1))
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(WAIT_S)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009


def test_slow_requests_are_logged_stage_by_stage(caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakePolicy(), slow_ms=1e-6) as server:
        stock(server).infer({**state(1), "request_id": "r1"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "samebit"]
    assert line.startswith("Slow request 'r1': ")
    for part in ("preprocess", "queue", "infer", "denoise 3.0"):
        assert part in line


@pytest.mark.parametrize(
    "url", ["ws://", "ws://127.0.0.1:99999", "ws://[::1", "ws://a..b:80", "ws://127.0.0.1:9"]
)
def test_an_address_where_no_server_can_be_is_an_error_of_the_configuration(url: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.url=ws://.*no policy server"), connected(url, None):
        pass
