"""`accel=PATH.yaml`: a policy from a file, such as the auto.yaml that `accel=auto` writes."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from accel.errors import ConfigError
from tasks.composition import quoted
from tasks.yaml_source import scan

_SUFFIXES = (".yaml", ".yml")


def is_policy_file(value: str) -> bool:
    """Whether the value of an `accel` override is a file instead of one of the named choices."""
    return value.endswith(_SUFFIXES)


def overrides_of(value: str) -> list[str]:
    """The file as overrides on top of `accel=eager`, which has every field.

    Raises: ConfigError for a file that can't be read, is no mapping, or is read otherwise than it looks.
    """
    path = Path(expanduser(value))
    try:
        policy = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"accel={value}: no such file. task=run accel=auto writes one.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"accel={value}: can't be read as YAML ({reason}).") from None
    if not isinstance(policy, dict):
        raise ConfigError(f"accel={value}: expected a mapping like those in conf/accel.")
    scan(path, package="accel")  # refuses what the loader takes: keys that stand twice, numbers like 010
    return ["accel=eager", *(f"accel.{key}={_literal(item)}" for key, item in policy.items())]


def _literal(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, str):
        return quoted(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
