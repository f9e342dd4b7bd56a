"""The file of used signatures: what it can hold, what it refuses, and that stand-ins have the signature."""

from __future__ import annotations

import datetime
import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.errors import ConfigError, OutputError
from accel.graphs.example_arguments import UnknownFormError, annotated_dataclasses, describe, example
from accel.graphs.manifest import MAX_SIGNATURES, Manifest, UsedSignature, read_manifest, write_manifest
from accel.graphs.tree import flatten

CPU = torch.device("cpu")
ORIGIN = {"torch": "2.13.0", "gpu": "one", "model": "toy"}
TODAY = datetime.date(2026, 3, 1)


@dataclass(frozen=True)
class Inner:
    x: Tensor
    scale: float


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    mask: Tensor | None = None


def function(a: Outer, b: list[Inner] | None, c: Any = None) -> Tensor:
    raise NotImplementedError


CLASSES = annotated_dataclasses(function)
SHARED = torch.zeros(2, 3)
VALUES = {
    "nothing": {},
    "constants": {"a": None, "b": True, "c": -3, "d": "text", "e": 0.1, "f": float("inf"), "g": -0.0},
    "torch constants": {"a": torch.bfloat16, "b": torch.Size([2, 3])},
    "scalar": {"a": torch.tensor(1.5)},
    "dtypes": {"a": torch.zeros(2, dtype=torch.int64), "b": torch.ones(2, dtype=torch.bool)},
    "low precision": {"a": torch.zeros(4).bfloat16(), "b": torch.zeros(4).to(torch.float8_e4m3fn)},
    "complex": {"a": torch.zeros(3, dtype=torch.complex64)},
    "empty": {"a": torch.zeros(0, 4)},
    "transposed": {"a": torch.zeros(2, 3).t()},
    "strided": {"a": torch.zeros(4, 8)[:, ::2]},
    "expanded": {"a": torch.zeros(1, 3).expand(4, 3)},
    "misaligned": {"a": torch.zeros(9)[1:]},
    "same twice": {"a": SHARED, "b": [SHARED, torch.zeros(2, 3)]},
    "containers": {"a": [torch.zeros(1), (2, {"k": torch.zeros(2), 3: "v"})]},
    "dataclasses": {"a": Outer((Inner(torch.zeros(2), 0.5), Inner(torch.zeros(3), 1.0))), "b": None},
}


def signature(**changes: Any) -> UsedSignature:
    settings: dict[str, Any] = dict(
        stage="denoising",
        region="step",
        tensors=(),
        arguments={"n": 1},
        count=2,
        last_used=TODAY,
        bytes=10,
        ms_eager=1.5,
        ms_graph=0.5,
    )
    return UsedSignature(**settings | changes)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_stand_ins_have_the_signature_of_the_call(values: dict[str, Any]) -> None:
    key, _ = flatten(values, device=CPU)
    tensors, arguments = describe(key, CLASSES)
    arguments = json.loads(json.dumps(arguments))
    made = example(tensors, arguments, CLASSES, device=CPU)
    assert flatten(made, device=CPU)[0] == key


def test_stand_ins_are_random_zero_or_true_and_the_same_every_time() -> None:
    given = {
        "f": torch.zeros(2, 8),
        "h": torch.zeros(8, dtype=torch.bfloat16),
        "i": torch.ones(2, dtype=torch.int32),
        "b": torch.zeros(2, dtype=torch.bool),
    }
    tensors, arguments = describe(flatten(given, device=CPU)[0], {})
    first, second = (example(tensors, arguments, {}, device=CPU) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in given)
    assert first["f"].unique().numel() == 16
    assert first["h"].unique().numel() > 4
    assert not first["i"].any()
    assert first["b"].all()


@dataclass(frozen=True)
class Stranger:
    x: int


@pytest.mark.parametrize("value", [Stranger(1), b"bytes", 1j, {None: 1}], ids=repr)
def test_values_without_a_form_are_named(value: Any) -> None:
    key, _ = flatten({"a": value}, device=CPU)
    with pytest.raises(UnknownFormError):
        describe(key, CLASSES)


@pytest.mark.parametrize(
    "form",
    [
        {"dataclass": ["os.PathLike", {}]},
        {"dataclass": ["builtins.object", {}]},
        {"dataclass": [f"{__name__}.Inner", {"x": 1}]},
        {"dataclass": [f"{__name__}.Inner", {"x": 1, "scale": 2, "__class__": 3}]},
        {"tensor": 0},
        {"tensor": True, "list": []},
        {"float": "much"},
        {"dtype": "Tensor"},
        {"module": "os"},
        {"dict": [[[1], 2]]},
        {},
        0.5,
    ],
    ids=repr,
)
def test_forms_that_mean_nothing_are_refused(form: Any) -> None:
    with pytest.raises(UnknownFormError):
        example((), {"a": form}, CLASSES, device=CPU)


def test_a_file_comes_back_as_written(tmp_path: Path) -> None:
    key, _ = flatten({"x": torch.zeros(2, 3).t(), "y": 0.5}, device=CPU)
    tensors, arguments = describe(key, {})
    written = Manifest(
        origin=ORIGIN,
        signatures=(signature(tensors=tensors, arguments=arguments),),
    )
    write_manifest(tmp_path / "m.json", written)
    assert read_manifest(tmp_path / "m.json").of(ORIGIN) == written
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.json"]


def test_no_file_is_an_empty_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path / "none.json").of(ORIGIN) == Manifest(origin=ORIGIN)
    with pytest.raises(ConfigError, match="there is no folder"):
        read_manifest(tmp_path / "nowhere" / "none.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"origin": ORIGIN | {"torch": "2.11.0"}}, "torch 2.13.0 vs 2.11.0"),
        ({"schema": 2}, "schema 2, this version reads 1"),
    ],
)
def test_another_origin_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "m.json"
    write_manifest(path, replace(Manifest(origin=ORIGIN, signatures=(signature(),)), **change))
    with caplog.at_level(logging.INFO, logger="samebit"):
        assert read_manifest(path).of(ORIGIN) == Manifest(origin=ORIGIN)
    (record,) = caplog.records
    assert said in record.message


def _with(place: str, value: Any) -> bytes:
    rows = {
        "origin": ORIGIN,
        "schema": 1,
        "signatures": [
            {
                "stage": "s", "region": "r", "tensors": [{"shape": [2], "dtype": "float32", "stride": [1]}],
                "arguments": {}, "count": 1, "last_used": "2026-03-01", "bytes": 0,
                "ms_eager": 1.0, "ms_graph": 0.5,
            }
        ],
    }  # fmt: skip
    target: Any = rows
    *path, last = place.split("/")
    for part in path:
        target = target[int(part) if part.isdigit() else part]
    target[last] = value
    return json.dumps(rows).encode()


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "truncated"),
        (b"not json", "malformed"),
        (b"[]", "object"),
        (_with("signatures/0/count", -1), r"\$\.signatures\[0\]\.count"),
        (_with("signatures/0/last_used", "yesterday"), r"\$\.signatures\[0\]\.last_used"),
        (_with("signatures/0/tensors", [{"shape": [-1]}]), r"tensors\[0\]\.shape\[0\]"),
        (_with("signatures", [{}] * (MAX_SIGNATURES + 1)), r"\$\.signatures"),
        (b'{"schema": 1, "origin": {}, "signatures": ' + b"[" * 100_000, "manifest"),
    ],
)
def test_damaged_files_name_the_place(tmp_path: Path, content: bytes, place: str) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=place) as refused:
        read_manifest(path)
    assert str(path) in str(refused.value)


def test_a_folder_is_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_manifest(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.json"
    write_manifest(path, Manifest(origin=ORIGIN))
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_manifest(path, Manifest(origin=ORIGIN, signatures=(signature(),)))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_counts_add_up_and_the_longest_unused_go_first() -> None:
    old = tuple(
        signature(arguments={"n": n}, last_used=TODAY - datetime.timedelta(days=n))
        for n in range(MAX_SIGNATURES)
    )
    tomorrow = TODAY + datetime.timedelta(days=1)
    used = [
        signature(arguments={"n": 5}, count=3, last_used=tomorrow),
        signature(arguments={"n": -1}, last_used=tomorrow),
    ]
    manifest = Manifest(origin=ORIGIN, signatures=old).updated(used)
    by_n = {each.arguments["n"]: each for each in manifest.signatures}
    assert len(by_n) == MAX_SIGNATURES
    assert (by_n[5].count, by_n[5].last_used) == (5, tomorrow)
    assert by_n.keys() == {*range(-1, MAX_SIGNATURES - 1)}
