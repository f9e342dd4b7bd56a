"""Bytes, a dtype's name and a shape, all from a stranger -> a numpy array."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.serving.errors import InvalidRequestError

MAX_AXES = 8

# Kind of a dtype -> what Python numbers it takes.
_HOLDS: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}

_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])|bool|u?int(?:8|16|32|64)|float(?:16|32|64)")


def array_from(data: Any, dtype: Any, shape: Any, *, max_bytes: int) -> npt.NDArray[Any]:
    """A C-ordered array in the memory of `data`, read-only where `data` is.

    data: bytes in C order. dtype: numpy's name of booleans, integers or floats, as text or bytes.
    shape: whole numbers >= 0.
    Raises: InvalidRequestError for object, void, complex, text, time and structured dtypes, and for
        a shape that is no shape or does not fit the bytes.
    """
    kind = _dtype(dtype)
    sizes = _shape(shape)
    if math.prod(max(size, 1) for size in sizes) * kind.itemsize > max_bytes:
        raise InvalidRequestError(f"array: shape {list(sizes)} of {kind} is beyond {max_bytes} bytes")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidRequestError(f"array: data is {type(data).__name__}, not bytes")
    expected = math.prod(sizes) * kind.itemsize
    if len(data) != expected:
        raise InvalidRequestError(
            f"array: shape {list(sizes)} of {kind} takes {expected} bytes, {len(data)} were sent"
        )
    return np.frombuffer(data, dtype=kind).reshape(sizes)


def scalar_from(data: Any, dtype: Any) -> np.generic:
    """One number of a dtype, from a Python number or from its bytes.

    Raises: InvalidRequestError for a dtype as in `array_from`, or a value that it can't hold.
    """
    kind = _dtype(dtype)
    if isinstance(data, bytes):
        return _only_element(array_from(data, dtype, (), max_bytes=kind.itemsize))
    if type(data) not in _HOLDS[kind.kind]:
        raise InvalidRequestError(f"number: {type(data).__name__} is no {kind}")
    try:
        with np.errstate(over="raise"):
            return _only_element(np.array(data, dtype=kind))
    except (OverflowError, FloatingPointError):
        raise InvalidRequestError(f"number: {data!r:.40} is beyond {kind}") from None


def _only_element(array: npt.NDArray[Any]) -> np.generic:
    element: np.generic = array.reshape(-1)[0]
    return element


def _dtype(name: Any) -> np.dtype[Any]:
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise InvalidRequestError(
            f"array: dtype {text!r:.40}; send booleans, integers or floats of up to 64 bits"
        )
    return np.dtype(text)


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple) or len(shape) > MAX_AXES:
        raise InvalidRequestError(f"array: shape {shape!r:.40}; send a list of up to {MAX_AXES} sizes")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidRequestError(f"array: shape {shape!r:.40}; sizes are whole numbers from 0")
    return tuple(shape)
