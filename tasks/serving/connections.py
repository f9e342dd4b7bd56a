"""Connections that cost nothing to open: bounded in number, closed if nothing is sent or nothing is read."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

REQUEST_TIMEOUT_S = 10.0
"""For the head of a request to arrive, WebSocket handshakes included."""
UNREAD_TIMEOUT_S = 10.0
"""For what was sent to be read."""
MAX_UNREAD = 2**16
"""Bytes that may wait for a client when its pings are answered."""


class _Impatient(asyncio.Protocol):
    """Cuts off a client that does not read. A polite close would wait until it has."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # writing pauses as soon as anything is left unread

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cut = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._be_patient()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._be_patient()
        super().connection_lost(exc)

    def _be_patient(self) -> None:
        if self._cut is not None:
            self._cut.cancel()


class BoundedWebSocket(_Impatient, WebSocketsSansIOProtocol):
    """Uvicorn's WebSocket protocol, whose pongs don't pile up."""

    def handle_ping(self) -> None:
        if self.transport.get_write_buffer_size() > MAX_UNREAD:
            self.conn.data_to_send()  # the pong, dropped
        else:
            super().handle_ping()


def bounded_protocol(max_connections: int) -> type[H11Protocol]:
    """Uvicorn's HTTP protocol for at most so many connections, those of WebSockets included."""

    class BoundedProtocol(_Impatient, H11Protocol):
        _timer: asyncio.TimerHandle

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_request()
            if len(self.connections) > max_connections:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def handle_websocket_upgrade(self, event: h11.Request) -> None:
            self._timer.cancel()
            self._be_patient()
            super().handle_websocket_upgrade(event)

        def on_response_complete(self) -> None:
            self._timer.cancel()
            self._await_request()
            super().on_response_complete()  # may begin the next request

        def _await_request(self) -> None:
            self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_if_silent)

        def _close_if_silent(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return BoundedProtocol
