"""Values of a config.json against the parameters of the diffusers class that takes them."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from accel.errors import CheckpointError


def check_values(config: Mapping[str, Any], library_class: Any, file: Path) -> None:
    """Refuse values that the class's parameters can't take, by their annotations and defaults.

    diffusers itself stores any value and fails later, where it is used. Keys that are no parameter and
    annotations that don't tell are passed over. file: where the values are from.
    Raises: CheckpointError naming every such key.
    """
    faults = list(_faults(config, library_class))
    if faults:
        raise CheckpointError(f"{file}: {'; '.join(faults)}. Fetch the file again, or correct it.")


def _faults(config: Mapping[str, Any], library_class: Any) -> Iterator[str]:
    annotations = _annotations(library_class)
    for name, parameter in inspect.signature(library_class.__init__).parameters.items():
        if name not in config or config[name] == parameter.default:
            continue
        annotation = annotations.get(name, _of_default(parameter.default))
        if not _fits(config[name], annotation):
            seen = textwrap.shorten(json.dumps(config[name]), 60)
            expected = inspect.formatannotation(annotation)
            yield f"'{name}' is {seen}, but {library_class.__name__} takes {expected}"


def _annotations(library_class: Any) -> dict[str, Any]:
    try:
        return get_type_hints(library_class.__init__)
    except (NameError, TypeError):  # an annotation that only type checkers can resolve
        return {}


def _of_default(default: Any) -> Any:
    return Any if default is None or default is inspect.Parameter.empty else type(default)


def _fits(value: Any, annotation: Any) -> bool:
    """Whole floats count as int, 0 and 1 as bool, lists as tuples: configs are written so."""
    if annotation is bool:
        return value in (0, 1)
    if annotation is int and isinstance(value, float):
        return value.is_integer()
    try:
        msgspec.convert(value, annotation, dec_hook=_undecided)
    except msgspec.ValidationError:
        return False
    except (TypeError, NotImplementedError):  # msgspec can't tell for such annotations
        return True
    return True


def _undecided(annotation: Any, value: Any) -> Any:
    raise NotImplementedError(annotation)
