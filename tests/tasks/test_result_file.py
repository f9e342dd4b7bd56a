"""result.json: complete, versioned, and refused when it is not what it should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from accel.errors import OutputError
from accel.record import Kind, Outcome, Reason, RunRecord
from tasks.result_file import RESULT_FILE, RunResult, encode_result, read_result


def example() -> RunResult:
    record = RunRecord()
    stage = record.stage("denoising")
    stage.add_wall(3.25)
    stage.outcomes[Outcome(Kind.EAGER, Reason.NO_CUDA)] = 4
    return RunResult(
        status="ok",
        verdict="not compared",
        pipeline={"model": "flux3_action"},
        config={"prompt": "été 猫", "seed": None},
        config_hash="0123456789ab",
        environment={"software": {"python": "3.11"}, "device": {"device": "cpu"}},
        requests=1,
        unequal_outputs=[],
        strict_violations=[],
        request=record.stage("request").to_dict(),
        stages=record.to_dict(),
        notes=[],
        digests={"denoising.action_tokens": "00ff"},
        files={"actions.npy": "ff00"},
    )


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    (tmp_path / RESULT_FILE).write_bytes(encode_result(example()))
    assert read_result(tmp_path) == example()
    assert read_result(tmp_path / RESULT_FILE) == example()


def test_is_readable_json_with_reasons_in_words() -> None:
    text = encode_result(example()).decode()
    rows = json.loads(text)
    assert next(iter(rows)) == "schema"
    assert rows["stages"][0]["outcomes"] == [{"kind": "eager", "reason": "no_cuda", "detail": "", "count": 4}]
    assert "été 猫" in text


def test_the_hit_ratio_is_the_share_of_replayed_calls() -> None:
    record = RunRecord()
    record.stage("denoising").outcomes.update({Outcome(Kind.REPLAYED): 3, Outcome(Kind.CAPTURED): 1})
    record.stage("action_decoding")
    assert [(row["tier"], row["hit_ratio"]) for row in record.to_dict()] == [("exact", 0.75), ("exact", None)]


def test_numbers_that_json_lacks_are_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_result(replace(example(), request={"cold_ms": float("nan")}))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"result\.json.*Did that run finish"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema": 1, "stat', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "schema None"),
        (b'{"schema": 2}', "schema 2, this version reads 1"),
        (b'{"schema": 1, "status": "ok"}', "not a result"),
        (encode_result(example()).replace(b'"ok"', b'"fine"'), "not a result"),
    ],
)
def test_damaged_or_foreign_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / RESULT_FILE).write_bytes(content)
    with pytest.raises(OutputError, match=message):
        read_result(tmp_path)


def test_records_are_plain_text_and_numbers() -> None:
    record = RunRecord()
    record.stage("vae").outcomes[Outcome(Kind.EAGER, Reason.NO_CUDA)] += 1
    (outcome,) = record.to_dict()[0]["outcomes"]
    assert [type(outcome[key]) for key in ("kind", "reason")] == [str, str]
