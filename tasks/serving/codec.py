"""msgpack with numpy arrays: the wire format of OpenPI, safe against whoever sends it (spec section 14.2).

An array is a map with the marker `__ndarray__`, a numpy number one with `__npgeneric__`; marker keys may be
text or bytes. The markers of the msgpack-numpy package (`nd`, `type`, `kind`) are read too. Nothing is ever
unpickled, and no memory is taken that the bytes received do not pay for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from tasks.serving.arrays import array_from, scalar_from
from tasks.serving.errors import InvalidRequestError, TooLargeError

# A list is allocated as long as its header says, before its items are seen, and headers nest.
_MAX_LIST = 2**16
_MARKERS = ("__ndarray__", "__npgeneric__", "nd")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one message.

    bytes: of the message. depth: of nesting. items: list elements, map entries and containers in all;
    three 360 x 640 cameras as nested JSON lists are 2.8 million.
    """

    bytes: int = 64 * 2**20
    depth: int = 16
    items: int = 2**22


def encode(value: Any) -> bytes:
    """The bytes that openpi-client's packer makes of the same value.

    Raises: TypeError for what has no place in a message, arrays of objects, records and complex included.
    """
    packed: bytes = msgpack.packb(value, default=_pack_numpy)
    return packed


def decode(data: bytes, limits: Limits) -> dict[str, Any]:
    """One message, a map with text keys. Arrays are read-only: each lies in the bytes that were unpacked.

    Raises: TooLargeError; InvalidRequestError saying what is wrong with the bytes.
    """
    if len(data) > limits.bytes:
        raise TooLargeError(f"message: {len(data)} bytes; at most {limits.bytes} are taken")
    builder = _Builder(limits)
    try:
        value = msgpack.unpackb(
            data,
            object_pairs_hook=builder.mapping,
            list_hook=builder.sequence,
            strict_map_key=False,  # markers may be bytes; `mapping` checks every key
            max_array_len=_MAX_LIST,
            max_map_len=_MAX_LIST,
            max_ext_len=0,
        )
    except InvalidRequestError:
        raise
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        detail = str(error) or type(error).__name__
        raise InvalidRequestError(f"message: no msgpack ({detail:.80})") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"message: a msgpack {type(value).__name__}; send a map")
    check_depth(value, limits.depth)
    return value


def check_depth(value: Any, depth: int) -> None:
    """Raises: InvalidRequestError if lists and maps are nested deeper than `depth`."""
    if not isinstance(value, dict | list):
        return
    if depth == 0:
        raise InvalidRequestError("message: nested too deeply")
    for child in value.values() if isinstance(value, dict) else value:
        check_depth(child, depth - 1)


def unique_mapping(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Raises: InvalidRequestError for keys that are no text or appear twice."""
    for key, _ in pairs:
        if not isinstance(key, str):
            raise InvalidRequestError(f"message: key {key!r:.40} is {type(key).__name__}; keys are text")
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidRequestError(f"message: key {twice!r:.40} appears twice")
    return values


class _Builder:
    """Makes lists, maps and arrays while a message is read, and stops when there are too many."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._items = 0

    def sequence(self, values: list[Any]) -> list[Any]:
        self._count(len(values))
        return values

    def mapping(self, pairs: list[tuple[Any, Any]]) -> Any:
        self._count(len(pairs))
        fields = {_text(key): value for key, value in pairs if isinstance(key, str | bytes)}
        if any(marker in fields for marker in _MARKERS):
            return _from_markers(fields, len(pairs), max_bytes=self._limits.bytes)
        return unique_mapping(pairs)

    def _count(self, children: int) -> None:
        self._items += 1 + children
        if self._items > self._limits.items:
            raise InvalidRequestError(f"message: more than {self._limits.items} values; send arrays as bytes")


def _text(key: str | bytes) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else key


def _from_markers(fields: dict[str, Any], entries: int, *, max_bytes: int) -> Any:
    marker = next(name for name in _MARKERS if name in fields)
    keys, is_array = set(fields) - {marker}, fields[marker]
    if len(fields) == entries:
        if marker == "__ndarray__" and is_array is True and keys == {"data", "dtype", "shape"}:
            return array_from(fields["data"], fields["dtype"], fields["shape"], max_bytes=max_bytes)
        if marker == "__npgeneric__" and is_array is True and keys == {"data", "dtype"}:
            return scalar_from(fields["data"], fields["dtype"])
        if marker == "nd" and is_array is False and keys == {"data", "type"}:
            return scalar_from(fields["data"], fields["type"])
        if marker == "nd" and is_array is True and keys == {"data", "type", "kind", "shape"}:
            return _msgpack_numpy_array(fields, max_bytes=max_bytes)
    raise InvalidRequestError(
        f"array: encoding with marker '{marker}' and keys {', '.join(sorted(keys)):.80} is not known; "
        "pack arrays as openpi-client does"
    )


def _msgpack_numpy_array(fields: dict[str, Any], *, max_bytes: int) -> Any:
    """kind: empty, or the letter of numpy's kind; the package marks pickled objects and records by it."""
    kind = fields["kind"]
    if not isinstance(kind, str | bytes) or _text(kind) not in ("", *"biuf"):
        raise InvalidRequestError(f"array: msgpack-numpy kind {kind!r:.20} is not taken; send numbers")
    return array_from(fields["data"], fields["type"], fields["shape"], max_bytes=max_bytes)


def _pack_numpy(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biuf":
        raise TypeError(f"{type(value).__name__} has no place in a message")
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": np.ascontiguousarray(value).data,  # the packer copies it
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
