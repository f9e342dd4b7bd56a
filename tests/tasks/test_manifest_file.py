"""`accel.manifest` in the `run` task: read before loading, captured before the first request, kept last."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pipeline import ACCEL, CONFIG, FakePipeline, interrupt_at

from accel.errors import ConfigError
from accel.graphs.manifest import UsedSignature, read_manifest
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.progress import Progress
from tasks import run
from tasks.config import RunConfig

USED = UsedSignature(
    stage="denoising",
    region="velocity",
    tensors=(),
    arguments={"n": 1},
    count=4,
    last_used=datetime.date(2026, 3, 1),
    bytes=0,
    ms_eager=2.0,
    ms_graph=1.0,
)


def with_manifest(path: Path, **model: Any) -> RunConfig:
    return replace(
        CONFIG,
        accel=replace(ACCEL, manifest=str(path)),
        model=Flux3Settings(name="flux3_action", **model),
    )


def test_the_manifest_of_one_run_is_captured_by_the_next(start, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    first, second = FakePipeline(used=[USED]), FakePipeline(used=[USED])
    start(first, with_manifest(path), folder=tmp_path / "a")
    assert first.precaptured == []
    start(second, with_manifest(path), folder=tmp_path / "b")
    (manifest,) = second.precaptured
    assert manifest.signatures == (USED,)
    assert read_manifest(path).signatures == (replace(USED, count=8),)


def test_a_manifest_of_other_settings_is_replaced(start, tmp_path: Path, caplog) -> None:
    path = tmp_path / "manifest.json"
    start(FakePipeline(used=[USED]), with_manifest(path), folder=tmp_path / "a")
    other = FakePipeline(used=[replace(USED, arguments={"n": 2})])
    start(other, with_manifest(path, steps=2), folder=tmp_path / "b")
    assert other.precaptured == []
    assert [r.message for r in caplog.records if "manifest" in r.message and "settings" in r.message]
    (signature,) = read_manifest(path).signatures
    assert signature.arguments == {"n": 2}


def test_a_run_without_graphs_leaves_the_manifest_alone(start, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    start(FakePipeline(used=[USED]), with_manifest(path), folder=tmp_path / "a")
    before = path.read_bytes()
    start(FakePipeline(), with_manifest(path), folder=tmp_path / "b")
    assert path.read_bytes() == before


def test_an_interrupted_run_still_writes_its_manifest(start, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with pytest.raises(KeyboardInterrupt):
        start(FakePipeline(used=[USED], before=interrupt_at(2)), with_manifest(path), folder=tmp_path / "a")
    assert read_manifest(path).signatures == (USED,)


def test_a_damaged_manifest_shows_before_anything_is_loaded(tmp_path: Path, monkeypatch) -> None:
    def load(config: RunConfig, *, progress: Progress) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(run, "load", load)
    path = tmp_path / "manifest.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"manifest\.json is not a manifest: .*schema"):
        run.main(with_manifest(path), folder=tmp_path / "a")
