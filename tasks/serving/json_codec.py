"""JSON bodies, and what stands for arrays and images in them (spec section 14.1)."""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.flux3_action.arrays import holds_text
from tasks.serving.arrays import array_from
from tasks.serving.codec import Limits, check_depth, unique_mapping
from tasks.serving.errors import InvalidRequestError, TooLargeError
from tasks.serving.image_files import decode_image

_ENCODED = ("b64_json", "base64")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_json(data: bytes, limits: Limits) -> dict[str, Any]:
    """One JSON object in UTF-8; duplicate keys, NaN, infinity and half characters are refused.

    Raises: TooLargeError; InvalidRequestError saying what is wrong with the bytes.
    """
    if len(data) > limits.bytes:
        raise TooLargeError(f"body: {len(data)} bytes; at most {limits.bytes} are taken")
    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > limits.items:
        raise InvalidRequestError(f"body: more than {limits.items} values; send images as files or msgpack")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique_mapping, parse_constant=_refuse_constant
        )
        if _SURROGATE.search(data):
            # Halves of a character can be escaped one by one, but no answer can repeat one alone.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except InvalidRequestError:
        raise
    except RecursionError:
        raise InvalidRequestError("body: nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"body: no JSON ({error!s:.80})") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"body: a JSON {type(value).__name__}; send an object")
    check_depth(value, limits.depth)
    return value


def image_from(value: Any, *, camera: str, limits: Limits) -> Any:
    """An image in any of its spellings -> array or `PIL.Image`.

    value: array; nested list; encoded file as bytes, as text in base64 (a `data:` prefix is allowed) or as
    `{"b64_json"|"base64": text}`; or `{"values"|"data", "dtype", "shape"}`.
    Raises: InvalidRequestError naming the camera.
    """
    try:
        if isinstance(value, str):
            value = _base64(value)
        elif isinstance(value, dict) and len(value) == 1 and (value.keys() & set(_ENCODED)):
            value = _base64(next(iter(value.values())))
        elif isinstance(value, dict):
            return array_value(value, limits)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"camera '{camera:.40}': {error}") from None
    if isinstance(value, bytes):
        return decode_image(value, camera=camera)
    if not isinstance(value, list):
        return value
    pixels = pixels_from_list(value)
    if pixels is None:
        raise InvalidRequestError(f"camera '{camera:.40}': a list, but not rows of pixels of numbers")
    return pixels


def pixels_from_list(value: list[Any]) -> npt.NDArray[Any] | None:
    """Rows of pixels of numbers: uint8 where all are whole and 0..255, else int64 or float64.

    Returns: `None` if the list is something else.
    Values outside 0..255 keep their type, so that they are refused later and not wrapped here.
    """
    if holds_text(value):
        return None
    try:
        pixels = np.asarray(value)
    except (ValueError, OverflowError):  # rows of unequal length
        return None
    if pixels.ndim != 3 or pixels.dtype.kind not in "if":
        return None
    is_bytes = pixels.dtype.kind == "i" and pixels.size and pixels.min() >= 0 and pixels.max() <= 255
    return pixels.astype(np.uint8) if is_bytes else pixels


def array_value(value: dict[str, Any], limits: Limits) -> npt.NDArray[Any]:
    """`{"values"|"data", "dtype", "shape"}`: a flat or nested list, or C-ordered bytes in base64.

    Raises: InvalidRequestError for anything else.
    """
    names = value.keys() & {"values", "data"}
    if value.keys() - names != {"dtype", "shape"} or len(names) != 1:
        raise InvalidRequestError("array: send values or data, together with dtype and shape")
    content = value[names.pop()]
    if isinstance(content, str):
        content = _base64(content)
    elif isinstance(content, list):
        content = _bytes_of(content, value["dtype"])
    return array_from(content, value["dtype"], value["shape"], max_bytes=limits.bytes)


def _bytes_of(values: list[Any], dtype: Any) -> bytes:
    """Numbers as bytes of that dtype, none of them changed."""
    kind = array_from(b"", dtype, (0,), max_bytes=8).dtype
    if holds_text(values):
        raise InvalidRequestError("array: text among the values; they are not numbers")
    try:
        given = np.asarray(values)
        with np.errstate(all="ignore"):
            cast = given.astype(kind)
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequestError("array: values are not numbers in rows of equal length") from None
    if given.dtype.kind not in "biuf" or (kind.kind != "f" and not np.array_equal(given, cast)):
        raise InvalidRequestError(f"array: values can't be held by {kind}")
    return cast.tobytes()


def _base64(text: Any) -> bytes:
    if not isinstance(text, str):
        raise InvalidRequestError(f"base64: {type(text).__name__} instead of text")
    _, _, encoded = text.rpartition("base64,") if text.startswith("data:") else ("", "", text)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"base64: {error!s:.80}") from None


def _refuse_constant(name: str) -> float:
    raise InvalidRequestError(f"body: {name} is no JSON number")
