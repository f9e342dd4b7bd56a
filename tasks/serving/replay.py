"""A robot's side of the wire: frames of an episode sent at the control rate, answers timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from accel.errors import ConfigError, SamebitError
from tasks.serving.codec import Limits, decode, encode

ANSWER_TIMEOUT_S = 120.0


class ServerError(SamebitError):
    """The server said something that is no answer, or nothing."""


@dataclass
class Replay:
    """What came back, in order of the frames sent.

    latencies_ms: from packing the observation until the answer is unpacked. chunks: float32 (K, A), or what
    the server said instead. timings: the server's own, in ms. late_ms: by how much each frame left after its
    time.
    """

    latencies_ms: list[float] = field(default_factory=list)
    chunks: list[npt.NDArray[np.float32] | str] = field(default_factory=list)
    timings: list[Mapping[str, float]] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)

    def missed(self, deadline_ms: float) -> int:
        """Answers that came later than this, and frames that got no actions."""
        pairs = zip(self.latencies_ms, self.chunks, strict=True)
        return sum(latency > deadline_ms or isinstance(chunk, str) for latency, chunk in pairs)

    @property
    def jitter_ms(self) -> float:
        """Mean difference between neighbouring latencies."""
        return float(np.abs(np.diff(self.latencies_ms)).mean()) if len(self.latencies_ms) > 1 else 0.0


class ChannelName(msgspec.Struct, frozen=True):
    """One column of the actions."""

    name: str
    unit: str


class Control(msgspec.Struct, frozen=True):
    """What the server says about how its actions are executed. fps: Hz."""

    fps: float
    channels: tuple[ChannelName, ...]


@contextlib.contextmanager
def connected(url: str, token: str | None) -> Iterator[tuple[ClientConnection, Control]]:
    """An OpenPI connection and what its server says first, once it is warm.

    Raises: ConfigError if there is no policy server, ServerError if it breaks off.
    """
    headers = None if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection = connect(url, compression=None, max_size=None, additional_headers=headers)
    except (OSError, ValueError, WebSocketException) as error:  # a ValueError: no such host or port can be
        raise ConfigError(f"task.url={url}: no policy server answers there ({error}).") from None
    try:
        with connection:
            yield connection, _control(_binary(connection.recv(ANSWER_TIMEOUT_S)))
    except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
        raise ServerError(f"The connection to {url} broke off: {error}. See the server's log.") from None


def replay(
    connection: ClientConnection, observations: Sequence[Mapping[str, Any]], *, period_s: float
) -> Replay:
    """Send each observation at its time and wait for its answer; a late answer delays the next frame.

    period_s: between frames; 0 sends as fast as answers come.
    """
    result = Replay()
    start = time.perf_counter()
    for index, observation in enumerate(observations):
        due = start + index * period_s if period_s else time.perf_counter()
        time.sleep(max(0.0, due - time.perf_counter()))
        begin = time.perf_counter()
        connection.send(encode(observation))
        chunk, timing = _answer(connection.recv(ANSWER_TIMEOUT_S))
        result.latencies_ms.append((time.perf_counter() - begin) * 1e3)
        result.late_ms.append((begin - due) * 1e3)
        result.chunks.append(chunk)
        result.timings.append(timing)
    return result


def _answer(message: str | bytes) -> tuple[npt.NDArray[np.float32] | str, Mapping[str, float]]:
    if isinstance(message, str):
        return message, {}
    answer = _binary(message)
    actions = answer.get("actions")
    if not isinstance(actions, np.ndarray) or actions.ndim != 2 or actions.dtype != np.float32:
        raise ServerError(f"The answer holds no chunk of actions, only {', '.join(answer):.80}.")
    return actions, answer.get("server_timing", {})


def _control(metadata: Mapping[str, Any]) -> Control:
    try:
        return msgspec.convert(metadata.get("control"), Control)
    except msgspec.ValidationError as error:
        raise ServerError(f"The server does not say how to execute its actions ({error}).") from None


def _binary(message: str | bytes) -> dict[str, Any]:
    if isinstance(message, str):
        raise ServerError(f"The server says: {message}")
    return decode(message, Limits())
