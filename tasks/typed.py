"""Plain values -> frozen dataclasses, refusing where a schema would convert.

Text never becomes a number or the reverse and is UTF-8, numbers are finite, unknown keys are errors
with a near match. Allowed types: dataclasses, unions of dataclasses told apart by their `name: Literal`,
`dict[str, ...]`, `| None` of those, and anything msgspec converts (bounds come from
`Annotated[..., msgspec.Meta(...)]`).
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from accel.errors import ConfigError
from accel.near_match import nearest
from tasks.yaml_source import COMMAND_LINE, Source, Written

T = TypeVar("T")

OTHER_NAMES = "other_names"
"""Key of `Meta(extra=...)`: what people write -> the value that it means, `None` for none of them."""


def convert(value: object, kind: type[T], *, key: str = "", source: Source | None = None) -> T:
    """Build a `kind` from plain dicts, lists and scalars.

    key: dotted name of the value, for messages. source: how the values were written.
    Raises: ConfigError naming the key, what is expected, and the value as written.
    """
    return _Converter(source or {}).convert(value, kind, key)  # type: ignore[no-any-return]


class _Converter:
    def __init__(self, source: Source) -> None:
        self._source = source

    def convert(self, value: object, hint: Any, key: str) -> Any:
        containers = _containers(hint)
        if not containers:
            return self._leaf(value, hint, key)
        if value is None and _nullable(hint):
            return None
        if not isinstance(value, dict):
            raise self._wrong(value, hint, key)
        container = containers[0] if len(containers) == 1 else self._tagged(value, containers, key)
        if is_dataclass(container):
            return self._dataclass(value, container, key)
        item = get_args(container)[1]
        return {self._name(name, key): self.convert(v, item, _join(key, name)) for name, v in value.items()}

    def _tagged(self, value: dict[str, Any], kinds: list[Any], key: str) -> Any:
        tags = {tag: kind for kind in kinds for tag in get_args(get_type_hints(kind)["name"])}
        name = value.get("name")
        if name not in tags:
            raise self._wrong(name, Literal[tuple(tags)], _join(key, "name"))
        return tags[name]

    def _dataclass(self, value: dict[str, Any], kind: Any, key: str) -> Any:
        hints = get_type_hints(kind, include_extras=True)
        for name in value:
            if name not in hints:
                raise self._unknown(str(name), sorted(hints), key)
        missing = [f.name for f in fields(kind) if f.name not in value and _required(f)]
        if missing:
            raise ConfigError(f"{_join(key, missing[0])}: no value given, and there is no default.")
        return kind(**{name: self.convert(v, hints[name], _join(key, name)) for name, v in value.items()})

    def _leaf(self, value: object, hint: Any, key: str) -> Any:
        if not _finite(value):
            raise self._wrong(value, hint, key)
        try:
            converted = msgspec.convert(value, hint, strict=True)
            msgspec.json.encode(converted)  # as results hold it
            return converted
        except msgspec.ValidationError:
            raise self._wrong(value, hint, key) from None
        except UnicodeEncodeError:  # a byte of the command line, or half a character such as "\ud800"
            raise ConfigError(f"{key}: not UTF-8 text{self._where(key)}. Write it in UTF-8.") from None
        except TypeError as error:
            raise ConfigError(f"{key}: JSON can't hold it{self._where(key)}: {error}") from None

    def _name(self, name: object, key: str) -> str:
        if not isinstance(name, str):
            raise ConfigError(f"{key}: the name {name} is not text. Put it in quotes.")
        self._leaf(name, str, key)
        return name

    def _unknown(self, name: str, known: list[str], key: str) -> ConfigError:
        full = _join(key, name)
        similar = nearest(name, known)
        elsewhere = (other for other in self._source if other.endswith(f".{name}") and other != full)
        near = next(elsewhere, None) if similar is None else _join(key, similar)
        hint = f"did you mean '{near}'?" if near else f"known here: {', '.join(known)}."
        return ConfigError(f"unknown key '{full}'{self._where(full)}; {hint}")

    def _wrong(self, value: object, hint: Any, key: str) -> ConfigError:
        written = self._source.get(key)
        text = (written.text if written else str(value)) or "''"
        near = _meant(value, hint) if isinstance(value, str) else None
        message = f"{key}: expected {describe(hint)}, got {text}{self._where(key)}"
        if near:
            message += f"; did you mean '{near}'?"
        elif isinstance(value, bool | int | float) and (_takes_text(hint) or text in _choices(hint)):
            message += f". It is read as {value}; to keep it as text write {_quoted(key, text, written)}"
        return ConfigError(message)

    def _where(self, key: str) -> str:
        """ " (file:line)" of the key or of the first key below it."""
        for known, written in self._source.items():
            if known == key or known.startswith(f"{key}."):
                return f" ({written.place})"
        return ""


def describe(hint: Any) -> str:
    """What a type accepts, in words: "a whole number from 1 to 256 or null"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(args[0], args[1])
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in args)
    if len(_members(hint)) > 1:
        return " or ".join(dict.fromkeys(describe(kind) for kind in _members(hint)))
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    if hint in words:
        return words[hint]
    if hint is NoneType:
        return "null"
    if origin in (list, tuple):
        return f"a list in which each item is {describe(args[0])}"
    return "a mapping {name: value}"


def _bounded(kind: Any, meta: msgspec.Meta) -> str:
    if meta.description is not None:
        return meta.description
    low, high = meta.ge, meta.le
    if low is not None and high is not None:
        return f"{describe(kind)} from {low} to {high}"
    if low is not None:
        return f"{describe(kind)} of at least {low}"
    return f"{describe(kind)} above {meta.gt}" if meta.gt is not None else describe(kind)


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union; the type itself when it is none."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _nullable(hint: Any) -> bool:
    return NoneType in _members(hint)


def _containers(hint: Any) -> list[Any]:
    """The dataclasses and dict types of `hint`; none for leaves."""
    return [kind for kind in _members(hint) if is_dataclass(kind) or get_origin(kind) is dict]


def _meant(value: str, hint: Any) -> str | None:
    """The allowed value that was probably meant."""
    other_names = {
        name: allowed
        for meta in getattr(hint, "__metadata__", ())
        for name, allowed in (meta.extra or {}).get(OTHER_NAMES, {}).items()
    }
    if value in other_names:
        return other_names[value]  # type: ignore[no-any-return]
    return nearest(value, _choices(hint))


def _choices(hint: Any) -> list[str]:
    """The names that a `Literal` allows."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    literals = [kind for kind in _members(bare) if get_origin(kind) is Literal]
    return [str(choice) for kind in literals for choice in get_args(kind)]


def _takes_text(hint: Any) -> bool:
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in _members(hint)]
    return str in kinds


def _quoted(key: str, text: str, written: Written | None) -> str:
    if written is not None and written.place == COMMAND_LINE:
        return f"\"{key}='{text}'\""
    return f"{key.rpartition('.')[2]}: '{text}'"


def _finite(value: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(_finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def _required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
