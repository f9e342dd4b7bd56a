"""The keys of a region's arguments, and of calls like earlier ones by one look in C."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from accel.graphs.arguments import NamedArguments
from accel.graphs.capture import RunEagerError
from accel.graphs.signature import sealed_arguments
from accel.graphs.tree import Key, UnsupportedValueError, alignment, argument_name, distinct_tensors, flatten
from accel.record import Reason

_GUARDS_OPTIONS: dict[str, Any] = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}


def _proven_guards() -> Callable[..., Any] | None:
    """Compares types, dispatch keys (layout, lazy views, quantisation), dtypes, devices, shapes and strides.

    The tensors must all be different ones. A private part of torch; `None` where it is not what it was, and
    then every call is described.
    """
    like, unlike = torch.empty(2, 3, device="cpu"), torch.empty(3, 2, device="cpu").t()
    try:
        guards: Callable[..., Any] = torch._C._dynamo.guards.TensorGuards
        check = guards(torch.empty(2, 3, device="cpu"), **_GUARDS_OPTIONS).check
        return guards if check(like) and not check(unlike) and not check(like.double()) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


_TensorGuards = _proven_guards()


class ArgumentKeys:
    """Describes calls of one function.

    Whoever comes from waiting for the device needs some 60 us for a description, before the launch. A call
    with nothing but positional tensors is therefore first compared with the last few such calls.
    """

    _REMEMBERED = 4

    def __init__(self, function: NamedArguments, device: torch.device) -> None:
        self._function = function
        self._device = device
        self._known: deque[_TensorCall] = deque(maxlen=self._REMEMBERED)

    def of_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sealed: Hashable | None
    ) -> tuple[Key, list[Tensor]]:
        """The arguments' key and distinct tensors. sealed: stands for the arguments, see `WholeGraph.call`.

        Raises: TypeError as the call itself would; RunEagerError for what no graph can take in.
        """
        if sealed is not None:
            return sealed_arguments(sealed), distinct_tensors(self._function.bind(args, kwargs))
        if not kwargs:
            for known in self._known:
                if known.resembles(args):
                    return known.key, known.in_order_of_key(args)
        values = self._function.bind(args, kwargs)
        key, tensors = self.of_values(values)
        all_given = len(values) == len(args)  # else a default may be one of the tensors
        if _TensorGuards is not None and all_given and _are_distinct_tensors(args):
            self._known.appendleft(_TensorCall(args, key, tensors, alignment(self._device)))
        return key, tensors

    def of_values(self, values: dict[str, Any]) -> tuple[Key, list[Tensor]]:
        """As `of_call`, of arguments by name."""
        try:
            with torch._C.DisableTorchFunction():  # else `with torch.device(...)` would see every look
                return flatten(values, device=self._device)
        except UnsupportedValueError as error:
            raise RunEagerError(Reason.UNSUPPORTED_INPUT, argument_name(str(error))) from None


def _are_distinct_tensors(args: tuple[Any, ...]) -> bool:
    return 0 < len(args) == len({*map(id, args)}) and all(type(arg) is Tensor for arg in args)


class _TensorCall:
    """What a call with nothing but distinct positional tensors looked like. Holds none of them.

    tensors: `args` in the order of the key.
    """

    def __init__(self, args: tuple[Tensor, ...], key: Key, tensors: list[Tensor], alignment: int) -> None:
        self.key = key
        places = {id(arg): place for place, arg in enumerate(args)}
        self._order = [places[id(tensor)] for tensor in tensors]
        self._alignment = alignment
        self._offsets = self._offsets_of(args)
        assert _TensorGuards is not None
        self._guards = _TensorGuards(*args, **_GUARDS_OPTIONS)

    def resembles(self, args: tuple[Any, ...]) -> bool:
        """Whether `args` have the same key."""
        if len(args) != len(self._offsets) or not self._guards.check(*args):
            return False
        return self._offsets_of(args) == self._offsets

    def in_order_of_key(self, args: tuple[Tensor, ...]) -> list[Tensor]:
        return [args[place] for place in self._order]

    def _offsets_of(self, tensors: tuple[Tensor, ...]) -> list[int]:
        with torch._C.DisableTorchFunction():
            return [tensor.data_ptr() % self._alignment for tensor in tensors]
