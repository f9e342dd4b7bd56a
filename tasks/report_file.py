"""What the result files of `verify`, `bench` and `profile` have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from pipelines.pipeline import PipelineDescription
from tasks.config import RunConfig, config_hash
from tasks.environment import device_facts, software

SCHEMA = 1


def encode_report(config: RunConfig, description: PipelineDescription, findings: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON, indented: what was run and where, then what was found.

    findings: JSON-ready; numbers are finite.
    """
    head = {
        "schema": SCHEMA,
        "task": config.task.name,
        "pipeline": asdict(description),
        "config": msgspec.to_builtins(config),
        "config_hash": config_hash(config),
        "environment": {"software": software(), "device": device_facts(description.device)},
    }
    return (json.dumps(head | dict(findings), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def title_of(description: PipelineDescription) -> str:
    """For example "flux3_action, full, bfloat16, NVIDIA H200"."""
    device = device_facts(description.device)["name"]
    return f"{description.model}, {description.size}, {description.dtype}, {device}"
