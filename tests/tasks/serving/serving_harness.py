"""A server on a real socket, and a policy that is not there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from accel.errors import ObservationError
from tasks.serving.app import make_app
from tasks.serving.codec import Limits
from tasks.serving.policy import Answer, Parameters, Policy, RegionCalls
from tasks.serving.server import Server, bind
from tasks.serving.service import Service
from tasks.serving.settings import ServeTask

WAIT_S = 30.0
"""Longer than anything takes on a loaded machine; reached only by a failing test."""


@dataclass
class FakePolicy:
    """Actions full((2, 7), state[0]). `during(state)` runs inside each inference."""

    during: Callable[[float], None] = lambda state: None
    warming: Callable[[], None] = lambda: None
    inferred: list[float] = field(default_factory=list)
    metadata: Mapping[str, Any] = field(default_factory=lambda: {"model": "fake", "numbers": [1, 2]})

    def warm_up(self) -> None:
        self.warming()

    def prepare(self, observation: Mapping[str, Any], parameters: Parameters) -> float:
        state = observation.get("state")
        if state is None:
            raise ObservationError("state: missing; send 1 numbers")
        with np.errstate(over="ignore"):
            return float(np.asarray(state, dtype=np.float32).reshape(-1)[0])

    def infer(self, request: float) -> Answer:
        self.inferred.append(request)
        self.during(request)
        return Answer(
            actions=np.full((2, 7), request, np.float32),
            steps=4,
            caption_cached=False,
            stage_ms={"text_ms": 1.0, "observation_ms": 2.0, "denoise_ms": 3.0, "postprocess_ms": 0.5},
        )

    def region_calls(self) -> Iterable[RegionCalls]:
        return [RegionCalls("denoising", "replayed", "", 3), RegionCalls("vae", "eager", "no_cuda", 1)]


@dataclass
class Running:
    """port: of the loopback interface. stop: begin a graceful stop. ended: the server has stopped."""

    port: int
    service: Service
    loop: asyncio.AbstractEventLoop
    stop: Callable[[], None]
    ended: threading.Event
    error: list[BaseException]

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.http + path, timeout=WAIT_S)

    def waits_for(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds in the server's loop."""

        async def poll() -> None:
            while not condition():
                await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(poll(), self.loop).result(WAIT_S)


@contextlib.contextmanager
def serving(
    policy: Policy,
    *,
    token: str | None = None,
    limits: Limits | None = None,
    wait: bool = True,
    **settings: Any,
) -> Iterator[Running]:
    """The server in a thread of its own; `wait` for it to be warm."""
    task = ServeTask(name="serve", port=0, drain_s=5.0, **settings)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    started: list[tuple[Service, Server, asyncio.AbstractEventLoop]] = []
    up, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    async def run() -> None:
        service = Service(
            policy,
            queue_size=task.queue_size,
            latest_wins=task.latest_wins,
            deadline_ms=task.deadline_ms,
            slow_ms=task.slow_ms,
        )
        app = make_app(service, limits=limits or Limits(bytes=task.max_body_bytes), token=token)
        server = Server(app, service, task)
        started.append((service, server, asyncio.get_running_loop()))
        running = asyncio.create_task(server.run_service(listener))
        while not server.started and not running.done():
            await asyncio.sleep(0.002)
        up.set()
        await running

    def thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            errors.append(error)
        finally:
            up.set()
            ended.set()

    worker = threading.Thread(target=thread)
    worker.start()
    assert up.wait(WAIT_S)
    service, server, loop = started[0]
    running = Running(port, service, loop, server.ask_to_stop, ended, errors)
    try:
        if wait:
            running.waits_for(service.warm.is_set)
        yield running
    finally:
        if not ended.is_set():
            with contextlib.suppress(RuntimeError):  # it ended meanwhile
                server.ask_to_stop()
        worker.join(WAIT_S)
        assert not worker.is_alive()
