"""The policy server as a Ray Serve application: a replica for each GPU, on as many machines as Ray has.

Ray listens, spreads connections over the replicas, and starts lost ones again. Each replica is a process with
its own pipeline, worker thread and queue, and answers as `task=serve` does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from starlette.routing import Router
from starlette.types import ASGIApp

from accel.errors import ConfigError
from pipelines.build import build
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from tasks.config import RunConfig, compose
from tasks.heap import keep_freed_memory
from tasks.manifest_file import manifest_of
from tasks.serving.app import make_app
from tasks.serving.assembly import make_policy, make_service, serve_task
from tasks.serving.codec import Limits
from tasks.serving.settings import ServeTask, read_token

# Settings that Ray Serve has of its own -> where.
_LEFT_TO_RAY = {
    "host": "http_options.host",
    "port": "http_options.port",
    "tls_certificate": "http_options.ssl_certfile",
    "tls_key": "http_options.ssl_keyfile",
}


def policy(args: Mapping[str, Any]) -> serve.Application:
    """Application builder, for configuration files of Ray Serve and for `serve run`.

    args: as for `deployment`.
    """
    return deployment(args).bind()


def deployment(args: Mapping[str, Any]) -> serve.Deployment:
    """A deployment `policy` of one replica, which takes one GPU, or none with device=cpu.

    args: key -> value, as `python run.py` takes them; values that are no text are written as JSON. They
        travel to the replicas as text, and each makes its own pipeline of them.
    Raises: ConfigError for what `run.py` refuses, for what Ray decides (the address, TLS, device=cuda:N), and
        for accel=auto.
    """
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in args.items()}
    config = _compose(texts)
    _refuse_what_ray_decides(config)
    task = serve_task(config)
    # Where this is composed there may be no GPU; a replica gets one, or does not start.
    device = "cpu" if config.device == "cpu" else "cuda"

    def replica_app() -> ASGIApp:
        return build_app(texts | {"device": device})

    as_policy = serve.deployment(
        name="policy",
        ray_actor_options={"num_gpus": 0 if device == "cpu" else 1},
        max_ongoing_requests=task.max_connections,  # of which an open WebSocket is one
        graceful_shutdown_timeout_s=task.drain_s,
    )
    return as_policy(serve.ingress(replica_app)())


def build_app(args: Mapping[str, str]) -> ASGIApp:
    """The app of one replica. Its lifespan begins with the warm-up, before which Ray sends no request.

    accel.manifest is read and never written, as replicas may share the file.
    Raises: ConfigError, CheckpointError, ObservationError, DeviceMemoryError.
    """
    config = _compose(args)
    task = serve_task(config)
    token = read_token(task.token_file)
    manifest = manifest_of(config)
    keep_freed_memory()
    pipeline = build(config)
    assert isinstance(pipeline, Flux3ActionPipeline)
    service = make_service(make_policy(config, pipeline, manifest=manifest), task)

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        with contextlib.closing(pipeline), contextlib.closing(service):
            await service.warm_up()
            yield

    app = make_app(service, limits=Limits(bytes=task.max_body_bytes), token=token)
    return Router(default=app, lifespan=lifespan)


def _compose(args: Mapping[str, str]) -> RunConfig:
    return compose("task=serve", *(f"{key}={value}" for key, value in args.items()))


def _refuse_what_ray_decides(config: RunConfig) -> None:
    if not isinstance(config.task, ServeTask):
        raise ConfigError(f"task={config.task.name}: Ray Serve runs task=serve; leave task out.")
    if config.device.startswith("cuda:"):
        raise ConfigError(
            f"device={config.device}: Ray gives each replica a GPU of its own; leave device out."
        )
    if config.accel.auto_seconds is not None:
        raise ConfigError(
            "accel.auto_seconds: replicas do not measure, each could choose another policy. Run task=run "
            "accel=auto once, and give the fleet the auto.yaml that it writes: accel=FOLDER/auto.yaml"
        )
    default = ServeTask(name="serve")
    for name, rays in _LEFT_TO_RAY.items():
        if getattr(config.task, name) != getattr(default, name):
            raise ConfigError(
                f"task.{name}: Ray Serve listens; set {rays} in its configuration file instead."
            )
