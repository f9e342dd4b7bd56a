"""HTTP over real sockets: formats, statuses, probes, metrics, who may talk, and how a server stops."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from serving_harness import WAIT_S, FakePolicy, serving
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from accel.errors import ConfigError
from tasks.serving import connections, http_api
from tasks.serving.app import make_app
from tasks.serving.bodies import MSGPACK
from tasks.serving.codec import Limits, decode, encode
from tasks.serving.security import check_tls
from tasks.serving.server import Server, bind
from tasks.serving.service import Service
from tasks.serving.settings import ServeTask, read_token

# The stock client uses a form of `connect` that its library no longer recommends.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")

PATH = "/v1/actions/generations"


@pytest.fixture(scope="module")
def server():
    with serving(FakePolicy(), max_body_mib=1) as running:
        yield running


def post(server: Any, **options: Any) -> httpx.Response:
    return httpx.post(server.http + PATH, timeout=WAIT_S, **options)


def test_json_in_and_out(server) -> None:
    body = {"request_id": "x", "input": {"state": [0.1]}}
    answer = post(server, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    envelope = answer.json()
    action = envelope["data"][0]["action"]
    assert (envelope["id"], envelope["object"], envelope["model"]) == ("x", "action.generation", "fake")
    assert {k: action[k] for k in ("type", "dtype", "shape")} == {
        "type": "continuous",
        "dtype": "float32",
        "shape": [2, 7],
    }
    assert np.array_equal(np.array(action["values"], np.float32), np.full((2, 7), 0.1, np.float32))
    assert envelope["usage"] == {
        "batch_size": 1,
        "action_horizon": 2,
        "action_dim": 7,
        "denoise_steps": 4,
        "prefix_cache_hit": False,
    }
    assert set(envelope["server_timing"]) >= {"queue_ms", "preprocess_ms", "denoise_ms"}


def test_raw_without_timing(server) -> None:
    runtime = {"response_format": "raw", "return_timing": False}
    answer = post(server, json={"input": {"state": [2]}, "runtime": runtime}).json()
    assert answer["actions"] == [[2.0] * 7] * 2
    assert answer["cache"] == {"enabled": True, "hit": False, "scope": "caption", "mode": "exact"}
    assert "timings" not in answer


@pytest.mark.parametrize("accept", [None, MSGPACK])
def test_msgpack_answers_with_arrays(server, accept: str | None) -> None:
    headers = {"content-type": MSGPACK} | ({} if accept is None else {"accept": accept})
    answer = post(server, content=encode({"state": np.array([5], np.float32)}), headers=headers)
    values = decode(answer.content, Limits())["data"][0]["action"]["values"]
    assert values.dtype == np.float32
    assert np.array_equal(values, np.full((2, 7), 5))


def test_form(server) -> None:
    answer = post(server, data={"request": '{"state": [3]}'}, files={"request2": b""})
    assert answer.status_code == 400  # an empty file is no image
    part = ("", '{"state": [3]}', "application/json")
    answer = post(server, files={"request": part})
    assert answer.json()["data"][0]["action"]["values"][0][0] == 3


@contextlib.contextmanager
def post_half(server: Any) -> Iterator[socket.socket]:
    """A request whose body does not come."""
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{".encode())
        yield connection


@pytest.mark.parametrize(
    ("options", "status", "kind"),
    [
        ({"json": {"input": {}}}, 400, "invalid"),
        ({"content": b"{"}, 400, "invalid"),
        ({"json": {"state": [1], "parameters": {"steps": 3}}}, 400, "invalid"),
        ({"json": {"state": [1], "runtime": {"output_format": "numpy"}}}, 400, "invalid"),
        ({"content": b"a", "headers": {"content-type": "text/plain"}}, 415, "unsupported_format"),
        ({"content": bytes(2**20 + 1)}, 413, "too_large"),
        ({"json": {"state": [1], "runtime": {"deadline_ms": 1e-6}}}, 504, "expired"),
        ({"json": {"state": [1e39]}}, 500, "fault"),
    ],
)
def test_statuses(server, options: dict[str, Any], status: int, kind: str) -> None:
    answer = post(server, **options)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


def test_compressed_bodies_are_refused_with_what_is_taken(server) -> None:
    body = b'{"state": [3]}'
    packed = post(server, content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert packed.status_code == 415
    assert packed.json()["error"] == {
        "type": "unsupported_format",
        "message": "content-encoding gzip: send identity, the body as it is",
    }
    assert post(server, content=body, headers={"content-encoding": "Identity"}).status_code == 200


def test_metadata_probes_and_unknown_paths(server) -> None:
    assert server.get("/v1/actions/metadata").json() == {"model": "fake", "numbers": [1, 2]}
    assert server.get("/healthz").status_code == 200
    assert server.get("/readyz").status_code == 200
    assert server.get("/docs").status_code == 404
    assert server.get(PATH).status_code == 405


def test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakePolicy(), max_body_mib=1) as server:
        post(server, json={"state": [1]})
        post(server, json={})
        post(server, content=bytes(2**20 + 1))
        with monkeypatch.context() as patch:
            patch.setattr(http_api, "BODY_TIMEOUT_S", 0.05)
            with post_half(server) as slow:
                assert slow.recv(12) == b"HTTP/1.1 408"
        with post_half(server):
            server.waits_for(lambda: server.service._exchanges == 1)
        server.waits_for(lambda: server.service._exchanges == 0)
        WebsocketClientPolicy(server.ws).infer({"state": [1.0]})
        with connect(server.ws) as robot:
            robot.send("text")
            robot.recv(WAIT_S)  # the metadata
            robot.recv(WAIT_S)
        text = server.get("/metrics").text
    for line in (
        'samebit_requests_total{outcome="ok",protocol="http"} 1.0',
        'samebit_requests_total{outcome="invalid",protocol="http"} 1.0',
        'samebit_requests_total{outcome="too_large",protocol="http"} 1.0',
        'samebit_requests_total{outcome="slow_body",protocol="http"} 1.0',
        'samebit_requests_total{outcome="gone",protocol="http"} 1.0',
        'samebit_requests_total{outcome="invalid",protocol="openpi"} 1.0',
        'samebit_requests_total{outcome="ok",protocol="openpi"} 1.0',
        'samebit_stage_seconds_count{stage="denoise"} 2.0',
        'samebit_stage_seconds_count{stage="queue"} 2.0',
        "samebit_queue_depth 0.0",
        'samebit_region_calls_total{outcome="replayed",reason="",stage="denoising"} 3.0',
        'samebit_region_calls_total{outcome="eager",reason="no_cuda",stage="vae"} 1.0',
    ):
        assert line in text.splitlines()


def test_requests_whose_client_leaves_are_not_computed() -> None:
    reached, go = threading.Event(), threading.Event()

    def hold(state: float) -> None:
        reached.set()
        assert go.wait(WAIT_S)

    policy = FakePolicy(during=hold)
    with serving(policy) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as first:
            first.sendall(_request('{"state": [1]}'))
            assert reached.wait(WAIT_S)
            with socket.create_connection(("127.0.0.1", server.port)) as second:
                second.sendall(_request('{"state": [2]}'))
                server.waits_for(lambda: server.service._scheduler.waiting == 1)
            server.waits_for(lambda: server.service._scheduler.waiting == 0)
            go.set()
        assert post(server, json={"state": [3]}).status_code == 200
        assert policy.inferred == [1, 3]
        text = server.get("/metrics").text
        assert 'samebit_requests_total{outcome="gone",protocol="http"}' in text


def _request(body: str) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def test_nothing_is_answered_before_the_warm_up_is_done() -> None:
    go = threading.Event()
    policy = FakePolicy(warming=lambda: assert_set(go))
    with serving(policy, wait=False) as server:
        assert server.get("/healthz").status_code == 200
        assert server.get("/readyz").status_code == 503
        refused = post(server, json={"state": [1]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        with connect(server.ws) as held:
            with pytest.raises(TimeoutError):
                held.recv(timeout=0.05)
            go.set()
            assert decode(held.recv(WAIT_S), Limits()) == policy.metadata
        assert server.get("/readyz").status_code == 200


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_a_warm_up_that_fails_ends_the_server() -> None:
    def fail() -> None:
        raise ConfigError("no such thing")

    with serving(FakePolicy(warming=fail), wait=False) as server:
        assert server.ended.wait(WAIT_S)
    assert [str(error) for error in server.error] == ["no such thing"]


def test_a_stop_answers_what_was_taken_and_refuses_the_rest() -> None:
    reached, go = threading.Event(), threading.Event()

    def hold(state: float) -> None:
        reached.set()
        assert go.wait(WAIT_S)

    with serving(FakePolicy(during=hold)) as server:
        with connect(server.ws) as first, connect(server.ws) as second:
            first.recv(WAIT_S)
            second.recv(WAIT_S)
            first.send(encode({"state": [1.0]}))
            assert reached.wait(WAIT_S)
            server.stop()
            server.waits_for(lambda: not server.service.ready)
            assert server.get("/readyz").status_code == 503
            second.send(encode({"state": [2.0]}))
            assert str(second.recv(WAIT_S)).startswith("unavailable: the server is stopping")
            go.set()
            assert decode(first.recv(WAIT_S), Limits())["actions"][0, 0] == 1
            with pytest.raises(ConnectionClosed):
                first.recv(WAIT_S)
        assert server.ended.wait(WAIT_S)
    assert server.error == []


def test_token() -> None:
    with serving(FakePolicy(), token="secret") as server:
        assert server.get("/healthz").status_code == 200
        assert server.get("/metrics").status_code == 401
        assert post(server, json={"state": [1]}).status_code == 401
        assert (
            post(server, json={"state": [1]}, headers={"authorization": "Bearer secreT"}).status_code == 401
        )
        assert (
            post(server, json={"state": [1]}, headers={"authorization": "Bearer secret"}).status_code == 200
        )
        with pytest.raises(InvalidStatus) as refused:
            connect(server.ws)
        assert refused.value.response.status_code == 401
        client = WebsocketClientPolicy("127.0.0.1", server.port, api_key="secret")
        assert client.infer({"state": [2.0]})["actions"][0, 0] == 2


def test_web_pages_are_kept_out(server) -> None:
    assert post(server, json={"state": [1]}, headers={"origin": "http://page"}).status_code == 403
    with pytest.raises(InvalidStatus) as refused:
        connect(server.ws, origin="http://page")
    assert refused.value.response.status_code == 403


def test_token_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert read_token(None) is None
    for content in (b"", b" \n", b"two words", "tökén".encode()):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="holds no token"):
            read_token(str(file))
    file.write_bytes(b"abc\n")
    assert read_token(str(file)) == "abc"
    with pytest.raises(ConfigError, match="can't be read"):
        read_token(str(tmp_path / "none"))


def test_tls(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=me"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    check_tls(certificate, key)
    with serving(FakePolicy(), tls_certificate=certificate, tls_key=key) as server:
        trust = ssl.create_default_context(cafile=certificate)
        answer = httpx.post(f"https://127.0.0.1:{server.port}{PATH}", json={"state": [1]}, verify=trust)
        assert answer.status_code == 200
        with connect(f"wss://127.0.0.1:{server.port}", ssl=trust) as connection:
            assert decode(connection.recv(WAIT_S), Limits())["model"] == "fake"
    with pytest.raises(ConfigError, match="not a certificate and its key"):
        check_tls(key, certificate)
    with pytest.raises(ConfigError, match="given together"):
        ServeTask(name="serve", tls_key=key)


def test_an_address_in_use_is_an_error_of_the_configuration() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match=r"task\.port=\d+: can't listen there"):
            bind("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["a..b", "nosuch.invalid", "192.0.2.1"])
def test_a_host_that_is_none_of_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.host=.*can't listen there"):
        bind(host, 0)


def test_of_two_servers_that_load_for_one_port_the_second_is_told() -> None:
    """Both may bind it before either listens."""

    async def serve_on(listener: socket.socket) -> None:
        service = Service(FakePolicy(), queue_size=1)
        app = make_app(service, limits=Limits(), token=None)
        await Server(app, service, ServeTask(name="serve")).run_service(listener)

    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(ConfigError, match=r"task\.port: can't listen any more"):
            asyncio.run(serve_on(second))


def test_silent_and_surplus_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 0.05)
    with serving(FakePolicy(), max_connections=2) as server:
        address = ("127.0.0.1", server.port)
        with connect(server.ws) as robot, socket.create_connection(address, WAIT_S) as silent:
            robot.recv(WAIT_S)
            silent.sendall(b"GET /healthz HTTP/1.1\r\n")
            assert is_closed(silent)
            with socket.create_connection(address, WAIT_S) as later:
                later.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /healthz HTTP/1.1\r\n")
                with later.makefile("rb") as answers:
                    assert answers.read().endswith(b"alive\n")  # and then the end
            with connect(server.ws) as other, socket.create_connection(address, WAIT_S) as surplus:
                other.recv(WAIT_S)
                assert is_closed(surplus)
            robot.send(encode({"state": [1.0]}))
            assert decode(robot.recv(WAIT_S), Limits())["actions"][0, 0] == 1


def is_closed(connection: socket.socket) -> bool:
    """By its other end, in either of the ways that TCP has."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
