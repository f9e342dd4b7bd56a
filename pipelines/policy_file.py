"""A chosen policy as a YAML file of the form of `conf/accel/*.yaml`, with the reason of every choice."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, fields
from typing import Any

import yaml  # type: ignore[import-untyped]

from accel.policy import AccelPolicy, StageOverride
from accel.selection import Choice
from pipelines.auto_policy import AutoChoice

# In tables, beside "auto" that measured anew.
NAME = "chosen"
_WIDTH = 100


def policy_yaml(choice: AutoChoice, *, origin: str) -> str:
    """The file's text. origin: what it was measured for, e.g. "flux3_action on NVIDIA H200, torch 2.13.0"."""
    settings = asdict(choice.policy) | {"name": NAME}
    common = {field.name: settings[field.name] for field in fields(AccelPolicy) if field.name != "stages"}
    not_tried = [f"Not tried: {candidate}: {why}" for candidate, why in choice.not_tried.items()]
    parts = [
        *map(
            _comment, (f"Chosen by accel=auto for {origin}. Fields as in conf/accel/auto.yaml.", *not_tried)
        ),
        _dump(common),
        "stages:\n" if choice.policy.stages else "stages: {}\n",
    ]
    for name, own in choice.policy.stages.items():
        parts.append(textwrap.indent(_stage(name, own, choice.stages.get(name)), "  "))
    return "".join(parts)


def _stage(name: str, own: StageOverride, choice: Choice | None) -> str:
    settings = {key: value for key, value in asdict(own).items() if value not in (None, {})}
    reason = "set by the user" if choice is None else f"{choice.candidate}: {choice.reason}"
    return _comment(reason) + _dump({name: settings})


def _comment(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="# ") + "\n"


def _dump(settings: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(settings, sort_keys=False)
    return text
