"""Nested arguments and results: lists, tuples, dicts and dataclasses of tensors and constants.

Three walks over one description of what a container holds: `flatten` (a hashable key and the
tensors), `map_tensors` (the same value with other tensors) and `leaf_names` (where each one sits).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

MAX_LEAVES = 4096
# Kernels are picked by pointer alignment: by cuBLASLt up to 256 bytes. CPU memory comes in units of 64.
_ALIGNMENT = {"cuda": 256}
_OTHER_ALIGNMENT = 64

_CONSTANTS = frozenset(
    (bool, int, float, str, bytes, type(None), torch.dtype, torch.layout, torch.memory_format, torch.Size)
)


_STRIDED = torch.strided


class TensorKey(NamedTuple):
    """alias: index of the distinct tensor. misalignment: see the function of that name.

    A single element has no layout: its stride is empty.
    """

    alias: int
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    misalignment: int


class Constant(NamedTuple):
    """A value that code may branch on. Floats are kept as exact hexadecimal text."""

    kind: type
    value: Hashable


class Node(NamedTuple):
    """A container. items: (index or dict key, key); dict entries are sorted. attributes: by name."""

    kind: type
    items: tuple[tuple[Any, Key], ...]
    attributes: tuple[tuple[str, Key], ...]


Key: TypeAlias = TensorKey | Constant | Node


class UnsupportedValueError(Exception):
    """A value that a graph can't take in or give out. `str()` names where it sits and what it is."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{''.join(self.path) or 'value'}: {self.problem}"


def flatten(value: Any, *, device: torch.device) -> tuple[Key, list[Tensor]]:
    """The value's key and its distinct tensors in the order of `TensorKey.alias`.

    Equal keys mean that code which reads the tensors' contents on the device alone runs the same way.
    Raises: UnsupportedValueError for tensors on another device, generators, modules and objects
    without a value-based hash.
    """
    walk = _Flattening(device)
    try:
        return walk.key(value), walk.tensors
    except RecursionError:
        raise UnsupportedValueError("nested too deeply") from None


def map_tensors(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """A value of the same types with every tensor replaced; containers are new, constants shared."""
    if isinstance(value, Tensor):
        return replace(value)
    contents = _contents(value)
    if contents is None:
        return value
    items = [(label, map_tensors(child, replace)) for label, child in contents.items]
    attributes = [(name, map_tensors(child, replace)) for name, child in contents.attributes]
    return _rebuild(value, items, attributes)


def leaf_names(key: Key, prefix: str = "") -> Iterator[tuple[str, TensorKey | Constant]]:
    """Yield (name, leaf), e.g. ("cond['txt'].pooled", TensorKey(...)), in the order of `flatten`."""
    if not isinstance(key, Node):
        yield prefix, key
        return
    for label, child in key.items:
        yield from leaf_names(child, prefix + f"[{label!r}]")
    for name, child in key.attributes:
        yield from leaf_names(child, f"{prefix}.{name}")


@functools.cache
def alignment(device: torch.device) -> int:
    """Bytes at whose multiples new memory of the device starts."""
    return _ALIGNMENT.get(device.type, _OTHER_ALIGNMENT)


def misalignment(tensor: Tensor) -> int:
    """Bytes from the last address that new memory could start at; 0 for a single element."""
    return 0 if tensor.numel() <= 1 else tensor.data_ptr() % alignment(tensor.device)


def distinct_tensors(value: Any) -> list[Tensor]:
    """The value's distinct tensors in the order of `TensorKey.alias`, looked at no further."""
    found: dict[int, Tensor] = {}
    _collect(value, found)
    return list(found.values())


def tensor_names(key: Key) -> list[str]:
    """The first name of every distinct tensor, in the order of `TensorKey.alias`."""
    names: dict[int, str] = {}
    for name, leaf in leaf_names(key):
        if isinstance(leaf, TensorKey):
            names.setdefault(leaf.alias, name)
    return list(names.values())


def argument_name(name: str) -> str:
    """In a dict of arguments, `cond['txt']` instead of `['cond']['txt']`."""
    argument, _, rest = name.removeprefix("['").partition("']")
    return argument + rest


def _collect(value: Any, found: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        found.setdefault(id(value), value)
    elif type(value) not in _CONSTANTS and (contents := _contents(value)) is not None:
        for _, child in chain(contents.items, contents.attributes):
            _collect(child, found)


class _Contents(NamedTuple):
    items: list[tuple[Any, Any]]
    attributes: list[tuple[str, Any]]


def _contents(value: Any) -> _Contents | None:
    """What a container holds; `None` for leaves."""
    kind = type(value)
    if kind is dict:
        return _Contents(_sorted_items(value), [])
    if isinstance(value, dict):
        return _Contents(_sorted_items(value), sorted(getattr(value, "__dict__", {}).items()))
    if isinstance(value, list) or kind is tuple or _rebuilds_from_iterable(kind):
        return _Contents(list(enumerate(value)), [])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _Contents([], _attributes(value))
    return None


def _rebuilds_from_iterable(kind: type) -> bool:
    """Named tuples and the result types of torch, e.g. `torch.return_types.max`."""
    return issubclass(kind, tuple) and (hasattr(kind, "_make") or hasattr(kind, "n_sequence_fields"))


def _sorted_items(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Entries in an order that does not depend on how the dict was filled."""
    try:
        return sorted(value.items(), key=itemgetter(0))
    except TypeError:
        return sorted(value.items(), key=lambda item: (type(item[0]).__name__, repr(item[0])))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    names = (field.name for field in dataclasses.fields(value))
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _rebuild(value: Any, items: list[tuple[Any, Any]], attributes: list[tuple[str, Any]]) -> Any:
    """A copy of the container with new contents, made without running its constructor."""
    kind = type(value)
    if isinstance(value, tuple):
        children = [child for _, child in items]
        return kind._make(children) if hasattr(kind, "_make") else kind(children)
    if isinstance(value, OrderedDict):  # its copy would run the constructor
        new = OrderedDict.__new__(kind)
        for label in value:
            OrderedDict.__setitem__(new, label, None)
        base: Any = OrderedDict
    else:
        new = copy.copy(value)
        base = dict if isinstance(value, dict) else list
    # The base class's setter: subclasses such as model outputs mirror entries in their own.
    for label, child in items:
        base.__setitem__(new, label, child)
    for name, child in attributes:
        object.__setattr__(new, name, child)
    return new


class _Flattening:
    """One walk: collects distinct tensors and counts values. Runs on every call, so it is kept lean."""

    def __init__(self, device: torch.device) -> None:
        self.tensors: list[Tensor] = []
        self._device = device
        self._alignment = alignment(device)
        self._alias: dict[int, int] = {}
        self._values = 0

    def key(self, value: Any) -> Key:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            return self._tensor(value)
        contents = None if kind in _CONSTANTS else _contents(value)
        if contents is None:
            return _constant(kind, value)
        items, attributes = contents
        return Node(kind, self._children(items, "[{!r}]"), self._children(attributes, ".{}"))

    def _children(self, children: list[tuple[Any, Any]], form: str) -> tuple[tuple[Any, Key], ...]:
        if not children:
            return ()
        self._values += len(children)
        if self._values > MAX_LEAVES:
            raise UnsupportedValueError(f"more than {MAX_LEAVES} leaves; pass tensors instead of long lists")
        keys = []
        try:
            for label, child in children:
                keys.append((label, self.key(child)))
        except UnsupportedValueError as error:
            error.path.insert(0, form.format(label))
            raise
        return tuple(keys)

    def _tensor(self, tensor: Tensor) -> TensorKey:
        device, dtype = tensor.device, tensor.dtype
        if device != self._device:
            raise UnsupportedValueError(f"tensor on {device}, expected {self._device}")
        lazy = tensor.is_neg() or (dtype.is_complex and tensor.is_conj())
        if lazy or tensor.layout is not _STRIDED or tensor.is_quantized:
            raise UnsupportedValueError("tensor is sparse, quantised or a lazy view; pass a plain one")
        if not tensor.is_contiguous() and _overlaps(tensor):
            raise UnsupportedValueError("tensor overlaps itself; pass a contiguous copy")
        tensors = self.tensors
        alias = self._alias.setdefault(id(tensor), len(tensors))
        if alias == len(tensors):
            tensors.append(tensor)
        elements = tensor.numel()
        stride = () if elements == 1 else tensor.stride()
        offset = 0 if elements <= 1 else tensor.data_ptr() % self._alignment
        # As `TensorKey(...)`, without the call that unpacks and packs the fields.
        return tuple.__new__(TensorKey, (alias, dtype, device, tensor.shape, stride, offset))


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory, expanded dimensions aside."""
    reach = 0
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1 and stride > 0):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _constant(kind: type, value: Any) -> Constant:
    if kind is float:
        return Constant(kind, value.hex())
    if kind is complex:
        return Constant(kind, (value.real.hex(), value.imag.hex()))
    if kind in _CONSTANTS:
        return Constant(kind, value)
    if isinstance(value, torch.Generator):
        raise UnsupportedValueError("random generator; draw the noise outside and pass it as a tensor")
    if isinstance(value, (Tensor, torch.nn.Module)):
        raise UnsupportedValueError(f"{kind.__name__}; pass a plain tensor, weights belong to the stage")
    try:
        hash(value)
    except TypeError:
        raise UnsupportedValueError(f"{kind.__name__} is not hashable") from None
    if kind.__hash__ is object.__hash__:  # type: ignore[comparison-overlap]
        raise UnsupportedValueError(f"{kind.__name__} is compared by identity, so its content could change")
    return Constant(kind, value)
