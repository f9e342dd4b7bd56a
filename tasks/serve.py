"""`task=serve`: a policy server. docs/serving.md tells how to use it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

from pipelines.build import build
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from tasks.auto_choice import as_chosen
from tasks.config import RunConfig
from tasks.console import RunConsole
from tasks.manifest_file import manifest_of
from tasks.serving.app import make_app
from tasks.serving.assembly import make_policy, make_service, serve_task
from tasks.serving.codec import Limits
from tasks.serving.flux3 import Flux3Policy
from tasks.serving.security import check_tls
from tasks.serving.server import Server, bind
from tasks.serving.settings import ServeTask, read_token

_log = logging.getLogger("samebit")


def main(config: RunConfig, *, folder: Path) -> None:
    """Serve until SIGTERM or Ctrl-C.

    folder: nothing is written to it. Address, token and TLS files are checked before weights are read.
    Raises: ConfigError, CheckpointError, ObservationError, DeviceMemoryError before the first connection;
        UnequalBitsError and StrictModeError when the warm-up finds them.
    """
    task = serve_task(config)
    token = read_token(task.token_file)
    if task.tls_certificate is not None and task.tls_key is not None:
        check_tls(task.tls_certificate, task.tls_key)
    manifest = manifest_of(config)
    with (
        contextlib.closing(bind(task.host, task.port)) as listener,
        RunConsole(config.logger.kind) as console,
    ):
        console.begin(config)
        with opened_as_configured(config, console) as pipeline:
            policy = make_policy(config, pipeline, manifest=manifest, progress=console.progress)
            _warn_if_open(listener, token)
            asyncio.run(_serve(policy, task, listener, token))
            if manifest is not None:
                manifest.save(pipeline)


@contextlib.contextmanager
def opened_as_configured(config: RunConfig, console: RunConsole) -> Iterator[Flux3ActionPipeline]:
    """The pipeline, with what `accel=auto` chose before the first connection; closed at the end."""
    with contextlib.closing(build(config, progress=console.progress)) as loaded:
        console.built(loaded.description)
        request = loaded.request_from(config)
        with as_chosen(loaded, request, config.accel, console=console) as (pipeline, _):
            assert isinstance(pipeline, Flux3ActionPipeline)
            yield pipeline


async def _serve(policy: Flux3Policy, task: ServeTask, listener: socket.socket, token: str | None) -> None:
    service = make_service(policy, task)
    app = make_app(service, limits=Limits(bytes=task.max_body_bytes), token=token)
    await Server(app, service, task).run_service(listener)


def _warn_if_open(listener: socket.socket, token: str | None) -> None:
    host = listener.getsockname()[0]
    if token is None and not ipaddress.ip_address(host).is_loopback:
        _log.warning("Anyone who reaches %s can use the robot's policy; set task.token_file", host)
