"""A policy over WebSocket: messages in, replies out in the same order, one connection for many episodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect

from tasks.serving.calls import Call
from tasks.serving.codec import encode
from tasks.serving.errors import FaultError, InvalidRequestError, ServingError
from tasks.serving.service import Reply, Service

FAULT_CODE = 1011
MAX_AHEAD = 2
"""Messages of one connection that are taken at a time; the rest stays in the network."""


class Dialect(Protocol):
    """How one kind of client speaks. name: for metrics. greeting: what the server says first, if anything."""

    @property
    def name(self) -> str: ...
    @property
    def greeting(self) -> Mapping[str, Any] | None: ...

    def read(self, message: bytes) -> Call:
        """Raises: ServingError."""

    def write(self, reply: Reply) -> dict[str, Any]: ...


async def converse(socket: WebSocket, service: Service, dialect: Dialect) -> None:
    """Serve one connection until it ends.

    Before the server is warm the connection is held, and the greeting waits. Errors are text frames, after
    which the connection goes on; only a fault of the server closes it, with code 1011.
    """
    await socket.accept()
    session = _Session(socket, service, dialect)
    try:
        async with asyncio.TaskGroup() as tasks:
            await session.receive(tasks)
            raise _EndedError  # cancels what is under way
    except* (_EndedError, WebSocketDisconnect):
        pass


class _EndedError(Exception):
    """The client is gone."""


class _Session:
    def __init__(self, socket: WebSocket, service: Service, dialect: Dialect) -> None:
        self._socket = socket
        self._service = service
        self._dialect = dialect
        self._client = object()  # a turn for every connection, whatever its address
        self._slots = asyncio.Semaphore(MAX_AHEAD)
        self._previous_ms: float | None = None

    async def receive(self, tasks: asyncio.TaskGroup) -> None:
        """Listen while requests are under way, so that a client that goes away is noticed at once."""
        previous = tasks.create_task(self._greet())
        while True:
            event = await self._socket.receive()
            if event["type"] == "websocket.disconnect":
                return
            await self._slots.acquire()
            previous = tasks.create_task(self._exchange(event, previous))

    async def _greet(self) -> None:
        await self._service.warm.wait()
        if self._dialect.greeting is not None:
            await self._send(encode(self._dialect.greeting))

    async def _exchange(self, event: Mapping[str, Any], previous: asyncio.Task[None]) -> None:
        begin = time.perf_counter()
        with self._service.exchange():
            answer = await self._answer(event)
            if not previous.done():
                await asyncio.wait([previous])
            await self._send(self._frame(answer))
            if isinstance(answer, FaultError):
                await self._socket.close(FAULT_CODE)
        self._previous_ms = (time.perf_counter() - begin) * 1e3
        self._slots.release()

    async def _answer(self, event: Mapping[str, Any]) -> Reply | ServingError:
        try:
            return await self._service.answer(
                partial(self._read, event.get("bytes")), client=self._client, protocol=self._dialect.name
            )
        except ServingError as error:
            return error

    def _read(self, message: bytes | None) -> Call:
        if message is None:
            raise InvalidRequestError("message: text; send one binary msgpack frame for each observation")
        return self._dialect.read(message)

    def _frame(self, answer: Reply | ServingError) -> str | bytes:
        """Text is what makes a stock client raise."""
        if isinstance(answer, ServingError):
            return f"{answer.reason}: {answer}"
        content = self._dialect.write(answer)
        if self._previous_ms is not None:
            content["server_timing"] = content["server_timing"] | {"prev_total_ms": self._previous_ms}
        return encode(content)

    async def _send(self, frame: str | bytes) -> None:
        """Raises: WebSocketDisconnect if the client has gone, or was cut off as it read nothing."""
        try:
            if isinstance(frame, str):
                await self._socket.send_text(frame)
            else:
                await self._socket.send_bytes(frame)
        except RuntimeError as error:
            # Uvicorn's word for a connection that its client has closed while an answer was on its way.
            raise WebSocketDisconnect(code=1006) from error
