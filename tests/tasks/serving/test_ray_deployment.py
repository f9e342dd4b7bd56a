"""The policy server on a local Ray cluster: two replicas, one lost, all stopped."""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import yaml
from serving_harness import WAIT_S
from starlette.testclient import TestClient
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from accel.errors import ConfigError, UnequalBitsError
from pipelines.build import build
from pipelines.flux3_action.observation import parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame
from tasks.config import ROOT, compose
from tasks.serving.bodies import MSGPACK
from tasks.serving.codec import Limits, decode, encode
from tasks.serving.flux3 import Flux3Policy
from tasks.serving.server import bind

serve = pytest.importorskip("ray.serve", reason="needs the extra `ray`", exc_type=ImportError)

import ray  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from tasks.serving import ray_deployment  # noqa: E402

ARGS = {
    "device": "cpu",
    "size": "tiny",
    "accel": "eager",
    "model.steps": 1,
    "model.guidance": 1.0,
    "model.guidance_action": 1.0,
}
TEXTS = {key: str(value) for key, value in ARGS.items()}
APP = "policy"
START_S = 120.0
"""For replicas to start: each is a process that imports torch, beside whatever else the machine does."""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"task.port": 9000}, r"http_options\.port"),
        ({"task.host": "0.0.0.0"}, r"http_options\.host"),
        ({"task.tls_certificate": "c.pem", "task.tls_key": "k.pem"}, r"http_options\.ssl_certfile"),
        ({"device": "cuda:1"}, "a GPU of its own"),
        ({"task": "bench"}, "leave task out"),
        ({"accel": "auto"}, r"accel=FOLDER/auto\.yaml"),
        ({"model": "flux2_klein"}, "robot policy"),
        ({"task.queue_sise": 4}, "queue_size"),
    ],
)
def test_refuses_before_any_replica_starts(args: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ray_deployment.policy(args)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("auto", 1), ("cuda", 1)])
def test_a_replica_takes_one_gpu_unless_it_runs_on_the_cpu(device: str, gpus: int) -> None:
    deployment = ray_deployment.deployment({"device": device, "task.max_connections": 7})
    assert deployment.ray_actor_options is not None
    assert deployment.ray_actor_options["num_gpus"] == gpus
    assert deployment.max_ongoing_requests == 7


def test_the_documented_configuration_deploys_this_module() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    found = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert found is not None
    application = ServeDeploySchema.model_validate(yaml.safe_load(found[1])).applications[0]
    assert application.import_path == f"{ray_deployment.__name__}:{ray_deployment.policy.__name__}"
    assert [own.name for own in application.deployments] == [ray_deployment.deployment(application.args).name]


def test_the_lifespan_warms_up_and_closes() -> None:
    client = TestClient(ray_deployment.build_app(TEXTS))
    assert client.get("/readyz").status_code == 503
    with client:
        assert client.get("/readyz").status_code == 200
    assert client.get("/readyz").status_code == 503


def test_a_replica_whose_warm_up_fails_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(self: Flux3Policy) -> None:
        raise UnequalBitsError("Warm-up requests gave different actions.")

    monkeypatch.setattr(Flux3Policy, "warm_up", warm_up)
    with pytest.raises(UnequalBitsError), TestClient(ray_deployment.build_app(TEXTS)):
        pass


@pytest.fixture
def observation() -> dict[str, Any]:
    raw = load_episode_frame(ROOT / "data" / "panda_lift", 5)
    return {
        "images": {camera: np.asarray(image) for camera, image in raw["images"].items()},
        "state": np.asarray(raw["state"], np.float32),
        "prompt": "lift the red cube",
    }


@pytest.fixture
def expected(observation: Mapping[str, Any]) -> torch.Tensor:
    """Actions of the bare pipeline, on one thread as Ray gives one to a replica of one CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = compose(*(f"{key}={value}" for key, value in TEXTS.items()))
        with contextlib.closing(build(config)) as pipeline:
            parsed = parse_observation(observation, pipeline.config)
            result = pipeline.run(pipeline.request(parsed, seed=None, settings=config.model))
        return torch.from_numpy(result.actions)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of Ray Serve on a cluster of two CPUs, one for each replica; nothing of it is left afterwards.

    The cluster is this test's own. By default Ray joins whichever was started last on this machine, and
    writes down where others find it to do the same: two tests at once would stop each other's replicas.
    """
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # or else Ray writes one to the home folder
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    folder = tempfile.TemporaryDirectory(
        prefix="ray-"
    )  # shorter than pytest's; a socket's path has 107 bytes
    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder.name,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()
        wait_until(lambda: nobody_listens(port))
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, on_sigterm)  # which Ray replaces for good
        folder.cleanup()


@pytest.mark.timeout(600)
def test_a_fleet_answers_replaces_a_lost_replica_and_stops(
    port: int, observation: dict[str, Any], expected: torch.Tensor
) -> None:
    fleet = ray_deployment.deployment(ARGS).options(num_replicas=2, health_check_period_s=0.5).bind()
    with ThreadPoolExecutor(1) as background, contextlib.ExitStack() as connections:

        def connected() -> ClientConnection:
            url = f"ws://127.0.0.1:{port}/v1/actions/realtime"
            return connections.enter_context(connect(url, max_size=None, open_timeout=WAIT_S))

        def replaced() -> bool:
            assert ready(port)  # the other serves meanwhile
            return len(set(replicas()) - set(originals)) == 1 and running() == 2

        starting = background.submit(serve.run, fleet, name=APP)
        wait_until(lambda: ready(port))
        assert (
            'stage="denoising"' in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S).text
        )  # it has warmed up
        starting.result(START_S)
        assert running() == 2

        # An open connection is load, so the second goes to the other replica.
        pair = [connected(), connected()]
        for connection in pair:
            assert torch.equal(over_websocket(connection, observation), expected)
        assert torch.equal(over_http(port, observation), expected)

        originals = replicas()
        lose(originals[0])
        (left,) = (connection for connection in pair if answers(connection, observation))
        assert torch.equal(over_http(port, observation), expected)
        wait_until(replaced)

        # A stop cuts nobody off. What answers once both originals are gone is the replacement.
        last = connected()
        stopping = background.submit(serve.delete, APP)
        wait_until(lambda: serve.status().applications[APP].status == "DELETING")
        lose(originals[1])
        assert not answers(left, observation)
        assert torch.equal(over_websocket(last, observation), expected)
        last.close()
        stopping.result(WAIT_S)
        assert replicas() == []


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def ready(port: int) -> bool:
    """Whether a replica answers. Asserted, too: no client ever reaches one that is not warm."""
    response = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=START_S)
    if response.status_code == 404:  # Ray's own answer while there is no replica
        return False
    assert response.text == "ready\n"
    return True


def nobody_listens(port: int) -> bool:
    """Connections are refused, and no more reset by a proxy that is about to end."""
    try:
        httpx.get(f"http://127.0.0.1:{port}/readyz")
    except httpx.TransportError as error:
        return isinstance(error, httpx.ConnectError)
    return False


def replicas() -> list[str]:
    """Names of the replicas that start, run or stop."""
    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in actors if name.startswith("SERVE_REPLICA")]


def running() -> int:
    """How many of them are ready."""
    states: Mapping[str, int] = serve.status().applications[APP].deployments["policy"].replica_states
    return states.get("RUNNING", 0)


def lose(replica: str) -> None:
    ray.kill(ray.get_actor(replica, namespace="serve"))


def over_http(port: int, observation: Mapping[str, Any]) -> torch.Tensor:
    response = httpx.post(
        f"http://127.0.0.1:{port}/v1/actions/generations",
        content=encode({"input": observation}),
        headers={"content-type": MSGPACK, "accept": MSGPACK},
        timeout=WAIT_S,
    )
    assert response.status_code == 200, response.text
    return actions_of(response.content)


def over_websocket(connection: ClientConnection, observation: Mapping[str, Any]) -> torch.Tensor:
    connection.send(encode({"input": observation}))
    answer = connection.recv(WAIT_S)
    assert isinstance(answer, bytes), answer
    return actions_of(answer)


def answers(connection: ClientConnection, observation: Mapping[str, Any]) -> bool:
    try:
        over_websocket(connection, observation)
    except ConnectionClosed:
        return False
    return True


def actions_of(message: bytes) -> torch.Tensor:
    return torch.from_numpy(decode(message, Limits())["data"][0]["action"]["values"])
