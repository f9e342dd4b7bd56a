"""Numbers of a client, in whatever holds them, as numpy arrays."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel.errors import ObservationError


def real_array(value: Any, *, name: str, what: str) -> npt.NDArray[Any]:
    """Integers or floats of up to 64 bits, as the client holds them; may share its memory.

    value: numpy array, dense torch tensor on any device, or nested list. bf16 becomes float32.
    name, what: of the value, and what belongs there, for the message.
    Raises: ObservationError for anything else.
    """
    if holds_text(value):
        raise ObservationError(f"{name}: text in a list; send {what}")
    try:
        array = np.asarray(_on_host(value))
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, sparse, on meta, float8, ...
        reason = str(error).partition("\n")[0]
        raise ObservationError(f"{name}: no array of numbers ({reason}); send {what}") from None
    if array.dtype.kind not in "uif" or array.dtype.itemsize > 8:
        seen = f" with values {array.min()} to {array.max()}" if array.dtype == bool and array.size else ""
        raise ObservationError(f"{name}: dtype {array.dtype}{seen}; send {what}")
    return array


def holds_text(value: Any) -> bool:
    """Whether nested lists hold text. In an array every element would take the memory of the longest."""
    level = value if isinstance(value, list) else []
    while True:
        kinds = set(map(type, level))
        if str in kinds or bytes in kinds:
            return True
        if list not in kinds:
            return False
        rows = level if kinds == {list} else [part for part in level if isinstance(part, list)]
        level = list(chain.from_iterable(rows))


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)
