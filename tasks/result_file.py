"""result.json: what one run was, did and gave. Tables and comparisons are made from these files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from accel.errors import OutputError

RESULT_FILE = "result.json"
SCHEMA = 1

Status = Literal["ok", "interrupted", "unequal", "not_strict"]
Verdict = Literal["equal", "unequal", "not compared"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run, JSON-ready.

    status: `unequal` when requests with the same inputs gave different bits, `not_strict` when
        accel.strict found something that ran eager, `interrupted` when the user stopped early.
    verdict: whether all requests gave the same bits; a single one is not compared.
    pipeline: the fields of `PipelineDescription`. config: the resolved configuration.
    environment: {"software": versions, "device": facts}.
    asked: numbers and texts of the request, with those that the configuration left open.
    requests: complete requests, the cold one included.
    unequal_outputs: "stage.field" names that differed between requests.
    request, stages: `StageRecord.to_dict()` of the whole request and of every stage; ms and bytes. Stages
        also have `not_worth_it`: live graphs that gain little, one line each.
    choices: what `accel=auto` chose for each stage: {"choice": ..., "reason": ...}; empty for other policies.
    notes: what the user should know of the result, e.g. that the prompt was cut short.
    digests: SHA-256 of every stage output of the first request, by "stage.field".
    files: SHA-256 of every output file, by name.
    """

    status: Status
    verdict: Verdict
    pipeline: dict[str, Any]
    config: dict[str, Any]
    config_hash: str
    environment: dict[str, dict[str, Any]]
    requests: int
    unequal_outputs: list[str]
    strict_violations: list[str]
    request: dict[str, Any]
    stages: list[dict[str, Any]]
    notes: list[str]
    digests: dict[str, str]
    files: dict[str, str]
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA


def encode_result(result: RunResult) -> bytes:
    """UTF-8 JSON, indented, with the schema number first."""
    rows = {"schema": result.schema} | asdict(result)
    return (json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_result(path: Path) -> RunResult:
    """Read result.json, or the one in a run folder.

    Raises: OutputError when it is missing, damaged or of another schema.
    """
    file = path / RESULT_FILE if path.is_dir() else path
    try:
        rows = json.loads(file.read_bytes())
    except OSError as error:
        raise OutputError(f"Can't read '{file}': {error.strerror}. Did that run finish?") from error
    except ValueError as error:
        raise OutputError(f"'{file}' is not JSON: {error}. Run again into a new folder.") from error
    schema = rows.get("schema") if isinstance(rows, dict) else None
    if schema != SCHEMA:
        raise OutputError(
            f"'{file}' has result schema {schema}, this version reads {SCHEMA}. "
            "Read it with the version that wrote it, or run again."
        )
    try:
        return msgspec.convert(rows, RunResult)
    except msgspec.ValidationError as error:
        raise OutputError(f"'{file}' is not a result of schema {SCHEMA}: {error}.") from error
