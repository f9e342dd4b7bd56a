"""Connections that cost nothing to open: bounded in number, and closed when no request comes."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 10.0
"""For the head of the first request to arrive, WebSocket handshakes included."""


def bounded_protocol(max_connections: int) -> type[H11Protocol]:
    """Uvicorn's HTTP protocol for at most so many connections, those of WebSockets included."""

    class BoundedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_if_silent)
            if len(self.connections) > max_connections:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def handle_websocket_upgrade(self, event: h11.Request) -> None:
            self._timer.cancel()
            super().handle_websocket_upgrade(event)

        def _close_if_silent(self) -> None:
            if self.cycle is None:
                self.transport.close()

    return BoundedProtocol
