"""A function and the names of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class NamedArguments:
    """Turns the two ways of passing arguments into one, and back for the call."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._signature = inspect.signature(fn)
        parameters = self._signature.parameters.values()
        self._all_named = all(parameter.kind in _NAMED for parameter in parameters)
        self._positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self._required = {p.name for p in parameters if p.default is inspect.Parameter.empty}
        self._defaults = {p.name: p.default for p in parameters}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Name -> value of every argument, defaults included, in order of declaration.

        Raises: TypeError as the call itself would.
        """
        if self._all_named and len(args) <= len(self._positional):
            given = dict(zip(self._positional, args, strict=False)) | kwargs
            values = self._defaults | given
            nothing_twice = len(given) == len(args) + len(kwargs)
            if nothing_twice and len(values) == len(self._defaults) and given.keys() >= self._required:
                return values
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def call(self, values: dict[str, Any]) -> Any:
        """The function's value for arguments by name."""
        bound = inspect.BoundArguments(self._signature, values)
        return self._fn(*bound.args, **bound.kwargs)
