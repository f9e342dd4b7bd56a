"""What a client is told when it gets no actions."""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar

from accel.errors import SamebitError

MAX_MESSAGE = 400
"""Characters of a message; clients choose keys and names that messages repeat."""


class ServingError(SamebitError):
    """A request that gets no actions. Its message goes to the client as it is.

    reason: one word for metrics and programs. status: of an HTTP answer.
    """

    reason: ClassVar[str]
    status: ClassVar[HTTPStatus]

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 4] + " ...")


class InvalidRequestError(ServingError):
    """Bytes, observation or parameters can't be used."""

    reason = "invalid"
    status = HTTPStatus.BAD_REQUEST


class TooLargeError(ServingError):
    """More bytes than the server takes."""

    reason = "too_large"
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class UnsupportedFormatError(ServingError):
    """Neither JSON nor msgpack nor multipart, or compressed."""

    reason = "unsupported_format"
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


class SlowRequestError(ServingError):
    """The body did not arrive in time."""

    reason = "slow_body"
    status = HTTPStatus.REQUEST_TIMEOUT


class BusyError(ServingError):
    """The queue is full."""

    reason = "busy"
    status = HTTPStatus.SERVICE_UNAVAILABLE


class UnavailableError(ServingError):
    """The server is warming up or stopping."""

    reason = "unavailable"
    status = HTTPStatus.SERVICE_UNAVAILABLE


class SupersededError(ServingError):
    """The same client sent a newer observation."""

    reason = "superseded"
    status = HTTPStatus.CONFLICT


class ExpiredError(ServingError):
    """The deadline passed before there were actions."""

    reason = "expired"
    status = HTTPStatus.GATEWAY_TIMEOUT


class FaultError(ServingError):
    """The server is at fault; its log says more."""

    reason = "fault"
    status = HTTPStatus.INTERNAL_SERVER_ERROR
