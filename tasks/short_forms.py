"""Short forms of overrides, written out: weights=./folder, weights=owner/name@revision, accel=file.yaml."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from accel.errors import ConfigError
from tasks.composition import quoted
from tasks.policy_choice import is_policy_file, overrides_of

_PATH = re.compile(r"(\.{0,2}|~)/.*|\.{1,2}")
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def written_out(texts: Iterable[str]) -> list[str]:
    """Overrides of keys and options that the configuration has. Raises: ConfigError."""
    return [override for text in texts for override in _written_out(text)]


def _written_out(text: str) -> list[str]:
    key, _, value = text.partition("=")
    bare = value.strip("'\"")
    if key == "accel" and is_policy_file(bare):
        if "," in bare:
            raise ConfigError(
                f"'{text}': in a sweep a policy file goes by its name. Keep it as mine/accel/kept.yaml and "
                "write --config-dir mine accel=eager,kept"
            )
        return overrides_of(bare)
    return _weights(text, bare) if key == "weights" else [text]


def _weights(text: str, bare: str) -> list[str]:
    if "," in bare and "/" in bare:
        raise ConfigError(f"'{text}': a sweep over folders is written weights=local weights.path=./a,./b")
    if _PATH.fullmatch(bare):
        return ["weights=local", f"weights.path={quoted(bare)}"]
    if "/" in bare and os.path.isdir(bare):
        raise ConfigError(f"'{text}': to load that folder write weights=./{bare}")
    if hub := _HUB_ID.fullmatch(bare):
        revision = [f"weights.revision={quoted(hub['revision'])}"] if hub["revision"] else []
        return ["weights=hub", f"weights.repo={quoted(hub['repo'])}", *revision]
    return [text]
