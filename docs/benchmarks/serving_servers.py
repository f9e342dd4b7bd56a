"""Servers in processes of their own, for the benchmark of serving."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from starlette.applications import Starlette
from starlette.routing import Mount, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.sync.client import ClientConnection, connect

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelines.build import build
from pipelines.flux3_action.image_format import ImageFormat
from pipelines.flux3_action.observation import Observation, parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame
from pipelines.flux3_action.synthetic import droid_config
from tasks.config import compose
from tasks.heap import keep_freed_memory
from tasks.serving.app import make_app
from tasks.serving.codec import Limits
from tasks.serving.flux3 import Flux3Defaults, Flux3Policy
from tasks.serving.policy import Answer, Parameters, Policy, RegionCalls
from tasks.serving.server import Server, bind
from tasks.serving.service import Service
from tasks.serving.settings import ServeTask

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 600.0
ECHO_PATH = "/echo"
"""Where nothing is done with a frame but to answer it with as many bytes as an answer has."""
ANSWER_BYTES = 1500


class CheckOnly:
    """Checks three-camera observations as FLUX 3 Action does, and returns fixed actions."""

    metadata: Mapping[str, Any] = {"model": "check-only"}

    def __init__(self) -> None:
        self._config = droid_config("full")

    def warm_up(self) -> None:
        pass

    def prepare(self, observation: Mapping[str, Any], parameters: Parameters) -> Observation:
        return parse_observation(observation, self._config)

    def infer(self, request: Observation) -> Answer:
        return Answer(actions=np.zeros((32, 8), np.float32), steps=0)

    def region_calls(self) -> Iterable[RegionCalls]:
        return ()


@dataclass(frozen=True)
class Child:
    """A server in a process of its own."""

    port: int
    pid: int

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @contextlib.contextmanager
    def opened(self, path: str = "/") -> Iterator[ClientConnection]:
        with connect(self.ws + path, compression=None, max_size=None) as connection:
            connection.recv(WAIT_S)
            yield connection


def serve(overrides: list[str]) -> None:
    """In the child: print the port, and serve until SIGTERM."""
    keep_freed_memory()
    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    asyncio.run(_serve(make_policy(overrides), listener))


def make_policy(overrides: list[str]) -> Policy:
    """FLUX 3 Action as the overrides compose it; without any, `CheckOnly`."""
    if not overrides:
        return CheckOnly()
    config = compose(*overrides)
    pipeline = build(config)
    defaults = Flux3Defaults(
        model_path="benchmark", settings=config.model, seed=0, images=ImageFormat(), max_steps=32
    )
    seen = parse_observation(load_episode_frame(ROOT / "data" / "panda_lift", 0), pipeline.config)
    return Flux3Policy(pipeline, defaults=defaults, warm_up_with=[seen], strict=False)


async def _serve(policy: Policy, listener: socket.socket) -> None:
    service = Service(policy, queue_size=64)
    app = make_app(service, limits=Limits(), token=None)
    routes = [WebSocketRoute(ECHO_PATH, _echo), Mount("/", app)]
    await Server(Starlette(routes=routes), service, ServeTask(name="serve", max_connections=256)).run_service(
        listener
    )


async def _echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_bytes(b"")
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            await socket.receive_bytes()
            await socket.send_bytes(bytes(ANSWER_BYTES))


@contextlib.contextmanager
def child(overrides: list[str]) -> Iterator[Child]:
    command = [sys.executable, __file__, *overrides]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        server = Child(int(process.stdout.readline()), process.pid)
        try:
            _wait_until_ready(server, process)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            errors.seek(0)
            print(errors.read()[-4000:], end="", file=sys.stderr)
    if process.returncode != 0:
        raise RuntimeError(f"The server ended with {process.returncode}.")


def _wait_until_ready(server: Child, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(server.http + "/readyz").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("The server did not become ready.")


def observation() -> dict[str, Any]:
    raw = load_episode_frame(ROOT / "data" / "panda_lift", 3)
    images = {f"observation.images.{name}": np.asarray(image) for name, image in raw["images"].items()}
    return {**images, "observation.state": np.asarray(raw["state"], np.float32), "prompt": raw["prompt"]}


if __name__ == "__main__":
    serve(sys.argv[1:])
