"""What WebSocket clients say and expect: OpenPI, RoboLab, and the realtime shape (spec section 14)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tasks.serving import replies
from tasks.serving.calls import Call, call_from
from tasks.serving.codec import Limits, decode
from tasks.serving.robolab import from_robolab, is_robolab
from tasks.serving.service import Reply


@dataclass(frozen=True)
class OpenPi:
    """Metadata first, then an observation for each chunk of actions, for `openpi-client` as it is.

    Observations with RoboLab's keys are answered as its clients expect.
    """

    greeting: Mapping[str, Any]
    limits: Limits
    name: str = "openpi"

    def read(self, message: bytes) -> Call:
        body = decode(message, self.limits)
        if is_robolab(body):
            return replace(call_from(from_robolab(body), self.limits), robolab=True)
        return call_from(body, self.limits)

    def write(self, reply: Reply) -> dict[str, Any]:
        if reply.call.robolab:
            return replies.robolab(reply)
        return replies.raw(reply, output_format=reply.call.runtime.output_format or "numpy")


@dataclass(frozen=True)
class Realtime:
    """Bodies and answers of the HTTP interface as msgpack frames, without a greeting."""

    model: str
    limits: Limits
    greeting: None = None
    name: str = "realtime"

    def read(self, message: bytes) -> Call:
        return call_from(decode(message, self.limits), self.limits)

    def write(self, reply: Reply) -> dict[str, Any]:
        return replies.generation(
            reply, model=self.model, output_format=reply.call.runtime.output_format or "numpy"
        )
