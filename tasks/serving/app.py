"""The ASGI application: every protocol of one service on one port."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from tasks.serving.codec import Limits
from tasks.serving.dialects import OpenPi, Realtime
from tasks.serving.http_api import HttpApi
from tasks.serving.security import Guard
from tasks.serving.service import Service
from tasks.serving.websocket import converse

OPENPI_PATHS = ("/", "/openpi/policy")
REALTIME_PATH = "/v1/actions/realtime"


def make_app(service: Service, *, limits: Limits, token: str | None) -> ASGIApp:
    """limits: of frames and bodies. token: what clients must send; `None` lets everyone in."""
    openpi = OpenPi(service.metadata, limits)
    realtime = Realtime(str(service.metadata["model"]), limits)

    async def serve_openpi(socket: WebSocket) -> None:
        await converse(socket, service, openpi)

    async def serve_realtime(socket: WebSocket) -> None:
        await converse(socket, service, realtime)

    routes = [
        *HttpApi(service, limits=limits).routes(),
        *(WebSocketRoute(path, serve_openpi) for path in OPENPI_PATHS),
        WebSocketRoute(REALTIME_PATH, serve_realtime),
    ]
    return Guard(Starlette(routes=routes), token=token)
