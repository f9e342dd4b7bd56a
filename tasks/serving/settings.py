"""What a user sets for the policy server and its client. Free of torch and of the server's libraries."""

from __future__ import annotations

from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from accel.errors import ConfigError
from pipelines.flux3_action.image_format import ImageFormat
from pipelines.number_types import Count, NonNegative, Positive

Port = Annotated[int, Meta(ge=0, le=65535)]


@dataclass(frozen=True, kw_only=True)
class ServeTask:
    """Answer observations over the network.

    host, port: where to listen; port 0 takes a free one and says which. token_file: text file with the
    bearer token that clients must send. tls_certificate, tls_key: PEM files, together.
    images: what pixel arrays of clients mean. max_body_mib: of one frame or body.
    max_connections: open at once. queue_size: requests that may wait. latest_wins: a newer observation
    of a connection replaces its older ones. deadline_ms: of a request that names none; `None` is no
    deadline. max_steps: denoising steps that a request may ask for. slow_ms: requests that took longer
    are logged. drain_s: how long a stop waits for requests under way. warm_up_prompts: captured before
    the server is ready, beside the observation's own prompt.
    Raises: ConfigError for TLS files that don't come together.
    """

    name: Literal["serve"]
    host: str = "127.0.0.1"
    port: Port = 8000
    token_file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    images: ImageFormat = field(default_factory=ImageFormat)
    max_body_mib: Annotated[int, Meta(ge=1, le=1024)] = 64
    max_connections: Count = 64
    queue_size: Count = 16
    latest_wins: bool = False
    deadline_ms: Positive | None = None
    max_steps: Count = 32
    slow_ms: Positive | None = None
    drain_s: NonNegative = 30.0
    warm_up_prompts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("task.tls_certificate and task.tls_key are given together; set both or none.")

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib * 2**20


@dataclass(frozen=True, kw_only=True)
class ClientTask:
    """Replay a recorded episode against a policy server at the control rate.

    url: of the server, ws:// or wss://. token_file: text file with the bearer token. requests: how many
    frames are sent; the episode is repeated if it is shorter. rate_hz: frames a second; `None` is the
    policy's own control rate, 0 sends as fast as answers come. open_loop: actions of each chunk that are
    executed before the next frame is sent. deadline_ms: answers later than this count as missed; `None`
    is the time between two requests.
    """

    name: Literal["client"]
    url: str = "ws://127.0.0.1:8000"
    token_file: str | None = None
    requests: Count = 60
    rate_hz: NonNegative | None = None
    open_loop: Count = 1
    deadline_ms: Positive | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("ws://", "wss://")):
            raise ConfigError(f"task.url: expected ws://HOST:PORT or wss://HOST:PORT, got {self.url}")


def read_token(path: str | None) -> str | None:
    """The bearer token in a text file, without surrounding white space; `None` for no file.

    Raises: ConfigError if the file can't be read, holds nothing, or holds more than one line of ASCII.
    """
    if path is None:
        return None
    try:
        token = Path(expanduser(path)).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"task.token_file={path}: can't be read ({error.strerror}).") from None
    if not token or not all(33 <= byte <= 126 for byte in token):
        raise ConfigError(f"task.token_file={path}: holds no token; put one line of printable ASCII there.")
    return token.decode("ascii")
