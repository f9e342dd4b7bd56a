"""A policy over HTTP: metadata, generations, health and metrics (spec section 14.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tasks.serving import replies
from tasks.serving.bodies import MSGPACK, read_body
from tasks.serving.calls import Call, call_from
from tasks.serving.codec import Limits, encode
from tasks.serving.errors import (
    InvalidRequestError,
    ServingError,
    SlowRequestError,
    TooLargeError,
    UnsupportedFormatError,
)
from tasks.serving.service import Reply, Service

BODY_TIMEOUT_S = 30.0
"""For a whole body to arrive."""

T = TypeVar("T")


class HttpApi:
    """The routes of one service. limits: of request bodies."""

    def __init__(self, service: Service, *, limits: Limits) -> None:
        self._service = service
        self._limits = limits

    def routes(self) -> list[Route]:
        return [
            Route("/v1/actions/metadata", self.metadata, methods=["GET"]),
            Route("/v1/actions/generations", self.generate, methods=["POST"]),
            Route("/healthz", self.alive, methods=["GET"]),
            Route("/readyz", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def alive(self, request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def ready(self, request: Request) -> Response:
        """200 once weights are loaded, graphs captured and a first replay verified, until a stop begins."""
        ready = self._service.ready
        return PlainTextResponse("ready\n" if ready else "not ready\n", status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def metadata(self, request: Request) -> Response:
        return _json(self._service.metadata)

    async def generate(self, request: Request) -> Response:
        with self._service.exchange():
            try:
                body = await self._received(request)
                in_msgpack = _wants_msgpack(request.headers)
                read = partial(self._read, body, request.headers, in_msgpack=in_msgpack)
                answering = self._service.answer(read, client=object(), protocol="http")
                return self._answered(await _unless_gone(answering, request), in_msgpack=in_msgpack)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except ServingError as error:
                return _refused(error)

    def _read(self, body: bytes, headers: Headers, *, in_msgpack: bool) -> Call:
        _require_uncompressed(headers)
        content_type = headers.get("content-type", "")
        call = call_from(read_body(body, content_type=content_type, limits=self._limits), self._limits)
        if call.runtime.output_format == "numpy" and not in_msgpack:
            raise InvalidRequestError(f"output_format: numpy goes with 'Accept: {MSGPACK}', not with JSON")
        return call

    async def _received(self, request: Request) -> bytes:
        """The body. A request that has none that can be read is counted here; the service never sees it."""
        try:
            return await self._body(request)
        except ClientDisconnect:
            self._service.metrics.outcome("http", "gone")
            raise
        except ServingError as error:
            self._service.metrics.outcome("http", error.reason)
            raise

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._limits.bytes:
                        raise TooLargeError(f"body: more than {self._limits.bytes} bytes")
        except TimeoutError:
            raise SlowRequestError(f"body: not complete after {BODY_TIMEOUT_S:g} s") from None
        return bytes(body)

    def _answered(self, reply: Reply, *, in_msgpack: bool) -> Response:
        chosen = reply.call.runtime.output_format or ("numpy" if in_msgpack else "list")
        model = str(self._service.metadata["model"])
        content = replies.generation(reply, model=model, output_format=chosen)
        return Response(encode(content), media_type=MSGPACK) if in_msgpack else _json(content)


def _wants_msgpack(headers: Headers) -> bool:
    """Where it is accepted or, with nothing said, was sent."""
    accepted, sent = headers.get("accept", "*/*"), headers.get("content-type", "")
    return "msgpack" in accepted or (accepted == "*/*" and "msgpack" in sent)


def _require_uncompressed(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedFormatError(f"content-encoding {encoding:.60}: send identity, the body as it is")


async def _unless_gone(work: Coroutine[Any, Any, T], request: Request) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises: ClientDisconnect."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(error: ServingError) -> Response:
    """`{"error": {"type", "message"}}`; a client that may try again is told when."""
    response = _json({"error": {"type": error.reason, "message": str(error)}}, status=error.status)
    if error.status == 503:
        response.headers["retry-after"] = "1"
    return response


def _json(content: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
