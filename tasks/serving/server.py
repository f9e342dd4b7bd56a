"""Listening, and stopping without cutting anyone off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from accel.errors import ConfigError
from tasks.serving.connections import BoundedWebSocket, bounded_protocol
from tasks.serving.service import Service
from tasks.serving.settings import ServeTask

_log = logging.getLogger("samebit")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that nobody can connect to yet. Raises: ConfigError if the address can't be had."""
    try:
        # Only where the protocol is given does asyncio send small answers at once (TCP_NODELAY).
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # a UnicodeError: no host has such a name
        raise ConfigError(
            f"task.host={host}, task.port={port}: can't listen there ({_reason(error)}). Take another."
        ) from None
    return listener


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class Server(uvicorn.Server):
    """Uvicorn that, when asked to stop, first answers what was taken; asked again, it stops at once.

    After a graceful stop the process goes on as usual, so it can end with exit code 0.
    """

    def __init__(self, app: ASGIApp, service: Service, settings: ServeTask) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=bounded_protocol(settings.max_connections),
                ws=BoundedWebSocket,
                ws_max_size=settings.max_body_bytes,
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=settings.tls_key,
            )
        )
        self._service = service
        self._drain_s = settings.drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def run_service(self, listener: socket.socket) -> None:
        """Listen, warm up, and answer until asked to stop. Raises: what the warm-up raises."""
        self._loop = asyncio.get_running_loop()
        warm_up = asyncio.create_task(self._service.warm_up())
        warm_up.add_done_callback(self._stop_unless_warm)
        try:
            await self.serve(sockets=[listener])
        finally:
            self._service.close()
        if warm_up.done():
            warm_up.result()
        warm_up.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:
            # Two servers may bind one port while they load; the first to listen has it.
            raise ConfigError(
                f"task.port: can't listen any more ({_reason(error)}). Choose another."
            ) from None
        for listener in sockets or ():
            _log.info("Listening at %s; ready when the warm-up is done", self._url(listener))

    def ask_to_stop(self) -> None:
        """Begin a graceful stop, from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or Ctrl-C."""
        if self._drain is None:
            self.ask_to_stop()
        else:
            super().handle_exit(sig, frame)

    def _url(self, listener: socket.socket) -> str:
        host, port, *_ = listener.getsockname()
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._finish_and_exit())

    async def _finish_and_exit(self) -> None:
        _log.info("Stopping: requests under way are answered, for up to %g s", self._drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await self._service.drain()
        self.should_exit = True

    def _stop_unless_warm(self, warm_up: asyncio.Task[None]) -> None:
        if warm_up.cancelled() or warm_up.exception() is not None:
            self.should_exit = True
