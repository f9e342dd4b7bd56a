"""One request of a client, in the shape that all protocols share (spec sections 14.1 and 14.3)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from tasks.serving.codec import Limits
from tasks.serving.errors import InvalidRequestError
from tasks.serving.json_codec import array_value, image_from
from tasks.serving.policy import Parameters

OutputFormat = Literal["list", "numpy"]
MAX_ID = 128
IMAGE_PREFIXES = ("observation.images.", "images.")

# Keys of a body with `input`; `model` is what generic clients send, and there is only one.
_ENVELOPE = {"request_id", "id", "model", "input", "parameters", "runtime"}

T = TypeVar("T")


class Runtime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request is answered.

    output_format: actions as nested lists or as a numpy array; `None` is what the message format does best.
    prefix_cache: encoded captions are always kept, so only true is taken. response_format: spec
    section 14.1. deadline_ms: after this time actions are of no use any more.
    """

    output_format: OutputFormat | None = None
    return_timing: bool = True
    prefix_cache: Literal[True] = True
    response_format: Literal["envelope", "raw"] = "envelope"
    deadline_ms: Annotated[float, Meta(gt=0)] | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """request_id: the client's, or a new one. observation: raw, as a policy's `prepare` takes it.

    robolab: the answer has the shape of RoboLab's own server.
    """

    request_id: str
    observation: Mapping[str, Any]
    parameters: Parameters
    runtime: Runtime
    robolab: bool = False


def call_from(body: Mapping[str, Any], limits: Limits) -> Call:
    """Read a body: an envelope with `input`, or an observation by itself.

    Raises: InvalidRequestError naming the field.
    """
    settings = {name: body[name] for name in ("parameters", "runtime") if body.get(name) is not None}
    parameters = dict(_mapping(settings.get("parameters", {}), "parameters"))
    runtime = dict(_mapping(settings.get("runtime", {}), "runtime"))
    if "output_format" in parameters:
        runtime.setdefault("output_format", parameters.pop("output_format"))
    parameters["seed"] = _only(parameters.get("seed"), "parameters.seed")
    return Call(
        request_id=_request_id(body),
        observation=_with_images(_observation(body), limits),
        parameters=_convert(parameters, Parameters, "parameters"),
        runtime=_convert(runtime, Runtime, "runtime"),
    )


def _observation(body: Mapping[str, Any]) -> dict[str, Any]:
    if "input" not in body:
        return {key: value for key, value in body.items() if key not in ("parameters", "runtime")}
    unknown = body.keys() - _ENVELOPE
    if unknown:
        raise InvalidRequestError(f"{min(unknown):.40}: stands beside `input`; put it into it")
    given = dict(_mapping(_only(body["input"], "input"), "input"))
    observation = dict(_mapping(given.pop("observation", {}), "input.observation"))
    for key in given.keys() & observation.keys():
        raise InvalidRequestError(f"input: '{key:.40}' stands in input and in input.observation; send one")
    return given | observation


def _with_images(observation: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The same with images and state in the spellings of JSON as arrays."""
    images = observation.get("images")
    if isinstance(images, dict):
        observation["images"] = {
            camera: image_from(value, camera=camera, limits=limits) for camera, value in images.items()
        }
    for key, value in observation.items():
        if key.startswith(IMAGE_PREFIXES):
            observation[key] = image_from(value, camera=key, limits=limits)
        elif key in ("state", "observation.state") and isinstance(value, dict):
            observation[key] = array_value(value, limits)
    return observation


def _request_id(body: Mapping[str, Any]) -> str:
    value = body.get("request_id")
    if value is None and "input" in body:
        value = body.get("id")  # an observation by itself may hold an `id` of the robot's own
    if value is None:
        return uuid.uuid4().hex
    if type(value) not in (str, int) or not 0 < len(str(value)) <= MAX_ID:
        raise InvalidRequestError(f"request_id: send a text of 1 to {MAX_ID} characters")
    return str(value)


def _only(value: Any, name: str) -> Any:
    """The element of a list of one; anything else as it is."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise InvalidRequestError(f"{name}: {len(value)} elements; send one")
    return value[0]


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name}: {type(value).__name__} instead of a map")
    return value


def _convert(values: Mapping[str, Any], kind: type[T], name: str) -> T:
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in values.items()}
    try:
        return msgspec.convert(plain, kind, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{name}: {error}") from None
