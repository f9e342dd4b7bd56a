"""A call's arguments as JSON, and stand-ins of the same signature made from it.

The form of a value: `null`, booleans, whole numbers and texts as they are; everything else an object of
one entry, e.g. {"tensor": 0} (a place in the list of tensors), {"float": "0.5"}, {"dtype": "bfloat16"},
{"tuple": [...]}, {"dict": [[key, value], ...]} or {"dataclass": [name, {field: value}]}.
Source: graph spec section 10.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from msgspec import Meta
from torch import Tensor

from accel.graphs.tree import Constant, Key, Node, TensorKey, leaf_names

Form: TypeAlias = Any  # as `json.loads` gives it
Classes: TypeAlias = Mapping[str, type]
Count = typing.Annotated[int, Meta(ge=0)]

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype
}


class UnknownFormError(Exception):
    """A value that can't be written as a form, or a form that can't be made a value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorForm:
    """Shape, dtype and layout of one distinct tensor.

    stride: in elements; empty for a single element. misalignment: bytes, see `accel.graphs.tree`.
    """

    shape: tuple[Count, ...]
    dtype: str
    stride: tuple[Count, ...]
    misalignment: Count = 0


def annotated_dataclasses(*functions: Callable[..., Any]) -> dict[str, type]:
    """ "module.name" -> dataclass, for every dataclass that the annotations mention, at any depth.

    Functions whose annotations can't be resolved contribute none.
    """
    found: dict[str, type] = {}
    for function in functions:
        _collect(function, found)
    return found


def describe(arguments: Key, classes: Classes) -> tuple[tuple[TensorForm, ...], dict[str, Form]]:
    """The distinct tensors of a signature, and the form of every argument by name.

    Raises: UnknownFormError for containers and constants that have no form.
    """
    if not isinstance(arguments, Node):
        raise UnknownFormError("the call was made under a sealed key")
    distinct: dict[int, TensorForm] = {}
    for _, leaf in leaf_names(arguments):
        if isinstance(leaf, TensorKey):
            distinct.setdefault(leaf.alias, _tensor_form(leaf))
    tensors = tuple(distinct[alias] for alias in range(len(distinct)))
    return tensors, {str(name): _form(key, classes) for name, key in arguments.items}


def example(
    tensors: tuple[TensorForm, ...], arguments: Mapping[str, Form], classes: Classes, *, device: torch.device
) -> dict[str, Any]:
    """Arguments of that signature: seeded random numbers, integers zero, booleans true.

    Raises: UnknownFormError.
    """
    generator = torch.Generator(device).manual_seed(0)
    made = [_tensor(form, device=device, generator=generator) for form in tensors]
    return {name: _value(form, made, classes) for name, form in arguments.items()}


def _collect(annotated: Any, found: dict[str, type]) -> None:
    try:
        hints = typing.get_type_hints(annotated)
    except (NameError, TypeError, AttributeError):
        return
    for hint in hints.values():
        for kind in _mentioned(hint):
            name = _class_name(kind)
            if dataclasses.is_dataclass(kind) and name not in found:
                found[name] = kind
                _collect(kind, found)


def _mentioned(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for argument in typing.get_args(hint):
        yield from _mentioned(argument)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _tensor_form(key: TensorKey) -> TensorForm:
    dtype = str(key.dtype).removeprefix("torch.")
    return TensorForm(
        shape=tuple(key.shape), dtype=dtype, stride=tuple(key.stride), misalignment=key.misalignment
    )


def _form(key: Key, classes: Classes) -> Form:
    if isinstance(key, TensorKey):
        return {"tensor": key.alias}
    if isinstance(key, Constant):
        return _constant_form(key)
    kind = key.kind
    items = [(label, _form(child, classes)) for label, child in key.items]
    fields = {name: _form(child, classes) for name, child in key.attributes}
    if kind in (list, tuple):
        return {kind.__name__: [form for _, form in items]}
    if kind is dict and all(type(label) in (str, int) for label, _ in items):
        return {"dict": [[label, form] for label, form in items]}
    name = _class_name(kind)
    if classes.get(name) is kind:
        return {"dataclass": [name, fields]}
    raise UnknownFormError(f"{name} is no list, tuple, dict of names, or dataclass that annotations mention")


def _constant_form(constant: Constant) -> Form:
    kind, value = constant
    if kind in (bool, int, str, type(None)):
        return value
    if kind is float:
        return {"float": repr(float.fromhex(str(value)))}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.Size:
        return {"size": list(typing.cast(torch.Size, value))}
    raise UnknownFormError(f"{kind.__name__} constants have no form")


def _value(form: Form, tensors: list[Tensor], classes: Classes) -> Any:
    match form:
        case dict() if len(form) != 1:
            pass
        case None | bool() | int() | str():
            return form
        case {"tensor": int(index)} if 0 <= index < len(tensors):
            return tensors[index]
        case {"float": str(text)} if _is_float(text):
            return float(text)
        case {"dtype": str(name)} if name in _DTYPES:
            return _DTYPES[name]
        case {"size": [*sizes]} if all(type(size) is int for size in sizes):
            return torch.Size(sizes)
        case {"list": [*items]}:
            return [_value(item, tensors, classes) for item in items]
        case {"tuple": [*items]}:
            return tuple(_value(item, tensors, classes) for item in items)
        case {"dict": [*pairs]}:
            return dict(_pair(pair, tensors, classes) for pair in pairs)
        case {"dataclass": [str(name), dict(fields)]} if name in classes:
            return _instance(classes[name], {k: _value(v, tensors, classes) for k, v in fields.items()})
    raise UnknownFormError(f"no value can be made from {str(form)[:80]}")


def _pair(pair: Form, tensors: list[Tensor], classes: Classes) -> tuple[str | int, Any]:
    match pair:
        case [str() | int() as label, form]:
            return label, _value(form, tensors, classes)
    raise UnknownFormError(f"{str(pair)[:80]} is no dict entry")


def _instance(kind: type, values: Mapping[str, Any]) -> Any:
    """An object with these fields, made without running its constructor."""
    names = {field.name for field in dataclasses.fields(kind)}
    if values.keys() != names:
        raise UnknownFormError(f"{kind.__name__} has the fields {sorted(names)}, not {sorted(values)}")
    instance: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def _tensor(form: TensorForm, *, device: torch.device, generator: torch.Generator) -> Tensor:
    dtype = _DTYPES.get(form.dtype)
    if dtype is None:
        raise UnknownFormError(f"no dtype {form.dtype}")
    stride = form.stride or (1,) * len(form.shape)
    if len(stride) != len(form.shape) or form.misalignment % dtype.itemsize:
        raise UnknownFormError(f"no tensor can be laid out as {form}")
    offset = form.misalignment // dtype.itemsize
    reach = sum((size - 1) * step for size, step in zip(form.shape, stride, strict=True))
    extent = offset + (0 if 0 in form.shape else 1 + reach)
    return _filled(extent, dtype, device=device, generator=generator).as_strided(form.shape, stride, offset)


def _filled(n: int, dtype: torch.dtype, *, device: torch.device, generator: torch.Generator) -> Tensor:
    if dtype.is_complex:
        return torch.randn(n, dtype=torch.complex64, device=device, generator=generator).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(n, device=device, generator=generator, dtype=torch.float32).to(dtype)
    return torch.full((n,), dtype == torch.bool, dtype=dtype, device=device)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
