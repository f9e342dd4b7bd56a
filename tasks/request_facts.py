"""Requests in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any


def describe_request(request: Any) -> dict[str, Any]:
    """What tells one request from another, JSON-ready."""
    prompt = request.prompt if hasattr(request, "prompt") else request.observation.prompt
    sizes = {name: getattr(request, name) for name in ("width", "height", "frames") if hasattr(request, name)}
    return {"seed": request.seed, "prompt": prompt, **sizes}


def request_in_full(request: Any) -> dict[str, Any]:
    """Its numbers and texts, JSON-ready, with those that the settings left open: of itself and what it holds.

    request: a dataclass. Pictures, tensors and notes are left out.
    """
    return dict(_plain_fields(request))


def _plain_fields(holder: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(holder):
        value = getattr(holder, field.name)
        if value is None or isinstance(value, int | float | str):
            yield field.name, value
        elif isinstance(value, tuple) and value and all(isinstance(item, int | float) for item in value):
            yield field.name, list(value)
        elif is_dataclass(value):
            yield field.name, dict(_plain_fields(value))
