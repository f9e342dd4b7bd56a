"""What library code looked like when a forward was written to stand in for it.

A release that changes the code changes the fingerprint, and the stock forward stays.
Source: fusion spec section 7.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

Code = type | Callable[..., Any]
"""A class of modules, a class of callables such as attention processors, or a function."""


@dataclass(frozen=True)
class Fingerprint:
    """parameters: names that `forward`, `__call__` or the function takes, in order.

    body: hash of its source. init: hash of the source of the constructor, which is where a class names
    its children and picks their classes; empty for a function or an inherited constructor.
    """

    parameters: tuple[str, ...]
    body: str
    init: str = ""


def fingerprint(code: Code) -> Fingerprint:
    """The fingerprint of code as it is installed. Raises: OSError, TypeError where no source is at hand."""
    if not isinstance(code, type):
        return Fingerprint(_parameters(code), _source_hash(code))
    body = code.forward if issubclass(code, nn.Module) else code.__call__
    init = vars(code).get("__init__")
    return Fingerprint(_parameters(body), _source_hash(body), _source_hash(init) if init else "")


def departure(code: Code, known: Mapping[str, Fingerprint]) -> str:
    """How the code departs from its known fingerprint, in words; empty if it does not.

    known: qualified name -> fingerprint.
    """
    name = qualified_name(code)
    if name not in known:
        return f"{name} is not known in this version of its library"
    try:
        actual = fingerprint(code)
    except (OSError, TypeError):
        return f"{name}: its source can't be read"
    expected = known[name]
    if actual.parameters != expected.parameters:
        return f"{name} takes ({', '.join(actual.parameters)}), not ({', '.join(expected.parameters)})"
    if actual.body != expected.body:
        return f"{name}: what it computes was changed"
    return "" if actual.init == expected.init else f"{name}: its constructor was changed"


def qualified_name(code: Code) -> str:
    """Module and name, e.g. "torch.nn.modules.linear.Linear"."""
    return f"{code.__module__}.{code.__qualname__}"


def minor_version(version: str) -> str:
    """The first two numbers of a version: "0.42.1" -> "0.42"."""
    return ".".join(version.split(".")[:2])


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def _source_hash(function: Callable[..., Any]) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
