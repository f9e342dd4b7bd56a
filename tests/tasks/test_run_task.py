"""The `run` task around a pipeline that is not there: order, files, and every way it can end."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_pipeline import ACCEL, CONFIG, FakePipeline, FakeResult, interrupt_at

from accel.errors import ConfigError, ObservationError, OutputError, StrictModeError, UnequalBitsError
from accel.runner import Runner
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.termination import Terminated
from tasks import run
from tasks.composition import Composer
from tasks.config import CONF, RunConfig, RunTask, build, config_hash
from tasks.result_file import RESULT_FILE, read_result


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_writes_outputs_and_what_happened(start, tmp_path: Path, capsys) -> None:
    pipeline = FakePipeline()
    start(pipeline)
    result = read_result(tmp_path)
    assert (result.status, result.verdict, result.requests) == ("ok", "equal", 4)
    assert (result.unequal_outputs, result.notes) == ([], ["prompt cut short"])
    assert result.asked == {"prompt": "go"}
    assert result.config["task"] == {"name": "run", "repeats": 3, "profile": "auto"}
    assert result.config_hash == config_hash(CONFIG)
    (stage,) = result.stages
    assert stage["walls_ms"] == [2.0, 3.0, 4.0]
    assert (stage["tier"], stage["hit_ratio"]) == ("exact", 0.0)
    assert stage["not_worth_it"] == ["denoising.step saves 1 %"]
    assert result.digests["denoising.sample"] == "same"
    assert names(tmp_path) == ["actions.npy", RESULT_FILE]
    assert list(result.files) == ["actions.npy"]
    assert pipeline.closed
    text = capsys.readouterr().out
    assert "\nNote: prompt cut short\n" in text
    assert "eager (no_cuda)" in text
    assert "4 like requests: all outputs equal" in text
    assert "the outputs mean nothing" in text


def test_unusable_folder_shows_before_anything_is_loaded(tmp_path: Path, monkeypatch) -> None:
    def load(config: RunConfig, *, progress: Progress) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(run, "load", load)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't be written to"):
        run.main(CONFIG, folder=tmp_path / "file" / "out")


def test_unequal_repeats_are_an_error_after_everything_is_written(start, tmp_path: Path, capsys) -> None:
    pipeline = FakePipeline(digest=lambda n: "other" if n == 2 else "same")
    with pytest.raises(UnequalBitsError, match=r"denoising\.sample\. If accel=eager does so too"):
        start(pipeline)
    result = read_result(tmp_path)
    assert (result.status, result.verdict) == ("unequal", "unequal")
    assert result.unequal_outputs == ["denoising.sample"]
    assert (tmp_path / "actions.npy").read_bytes() == b"same"
    assert "UNEQUAL" in capsys.readouterr().out
    assert pipeline.closed


def test_strict_fails_after_everything_is_written(start, tmp_path: Path) -> None:
    strict = replace(CONFIG, accel=replace(ACCEL, strict=True))
    with pytest.raises(StrictModeError, match=r"denoising\.velocity: no_cuda"):
        start(FakePipeline(violations=["denoising.velocity: no_cuda"]), strict)
    result = read_result(tmp_path)
    assert (result.status, result.strict_violations) == ("not_strict", ["denoising.velocity: no_cuda"])
    assert (tmp_path / "actions.npy").exists()


def test_strict_violations_are_no_error_unless_asked_for(start, tmp_path: Path) -> None:
    start(FakePipeline(violations=["denoising.velocity: no_cuda"]))
    assert read_result(tmp_path).status == "ok"


def test_ctrl_c_keeps_what_was_measured(start, tmp_path: Path, capsys) -> None:
    pipeline = FakePipeline(before=interrupt_at(2))
    with pytest.raises(KeyboardInterrupt):
        start(pipeline)
    result = read_result(tmp_path)
    assert (result.status, result.requests) == ("interrupted", 2)
    assert (tmp_path / "actions.npy").exists()
    text = capsys.readouterr().out
    assert "Interrupted" in text
    assert "denoising" in text
    assert pipeline.closed


def test_a_request_cut_short_counts_in_no_time(start, tmp_path: Path) -> None:
    runner = Runner(ACCEL, device=torch.device("cpu"))

    class TwoStages(FakePipeline):
        def run(self, request: str, *, progress: Progress = NULL_PROGRESS) -> FakeResult:
            with runner.request():
                with runner.stage("vae"):
                    pass
                return super().run(request, progress=progress)

    def after_a_stage(number: int) -> None:
        if number == 2:
            raise Terminated(signal.SIGTERM)

    pipeline = TwoStages(before=after_a_stage, record=runner.record)
    with pytest.raises(Terminated):
        start(pipeline)
    result = read_result(tmp_path)
    assert (result.status, result.requests) == ("interrupted", 2)
    assert [len(stage["walls_ms"]) for stage in result.stages] == [1, 1]


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_while_results_are_written_loses_none(start, tmp_path: Path, monkeypatch) -> None:
    pipeline = FakePipeline()
    files = pipeline.files

    def interrupted(result: FakeResult, *, config_hash: str) -> dict[str, bytes]:
        signal.raise_signal(signal.SIGINT)
        return files(result, config_hash=config_hash)

    monkeypatch.setattr(pipeline, "files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(pipeline)
    assert names(tmp_path) == ["actions.npy", RESULT_FILE]
    assert read_result(tmp_path).status == "ok"
    assert pipeline.closed


def test_ctrl_c_before_the_first_result_writes_nothing(start, tmp_path: Path) -> None:
    pipeline = FakePipeline(before=interrupt_at(0))
    with pytest.raises(KeyboardInterrupt):
        start(pipeline)
    assert names(tmp_path) == []
    assert pipeline.closed


def test_failing_request_leaves_the_folder_free_for_another_try(start, tmp_path: Path) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("out of luck")

    pipeline = FakePipeline(before=fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        start(pipeline)
    assert pipeline.closed
    start(FakePipeline())
    assert read_result(tmp_path).status == "ok"


def test_full_disk_still_shows_the_table(start, tmp_path: Path, capsys, monkeypatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pipeline = FakePipeline(before=lambda n: monkeypatch.setattr(os, "fsync", full) if n == 3 else None)
    with pytest.raises(OutputError, match="No space left"):
        start(pipeline)
    assert names(tmp_path) == []
    assert "all outputs equal" in capsys.readouterr().out
    assert pipeline.closed


def test_second_run_does_not_replace_the_first(start, tmp_path: Path) -> None:
    start(FakePipeline())
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with pytest.raises(OutputError, match="already holds a result"):
        start(FakePipeline(digest=lambda n: "second"))
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_one_request_is_not_compared(start, tmp_path: Path) -> None:
    start(FakePipeline(), replace(CONFIG, task=RunTask(name="run", repeats=0)))
    assert read_result(tmp_path).verdict == "not compared"


@pytest.mark.parametrize("device", ["cpu", "cuda:99"])
def test_a_device_that_cannot_serve_shows_before_anything_is_loaded(
    device: str, tmp_path: Path, monkeypatch
) -> None:
    def load(config: RunConfig, *, progress: Progress) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(run, "load", load)
    with pytest.raises(ConfigError, match=r"task\.profile=true needs CUDA|device=cuda:99"):
        run.main(replace(CONFIG, device=device, task=RunTask(name="run", profile=True)), folder=tmp_path)


def test_a_request_that_cannot_be_made_leaves_no_pipeline_open(monkeypatch) -> None:
    class Requestless(FakePipeline):
        def request_from(self, config: RunConfig) -> None:
            raise ObservationError("no such frame")

    pipeline = Requestless()
    monkeypatch.setattr(run, "build", lambda config, *, progress: pipeline)
    with pytest.raises(ObservationError, match="no such frame"):
        run.load(CONFIG, progress=NULL_PROGRESS)
    assert pipeline.closed


@pytest.mark.parametrize(
    "overrides", [("accel=segmented",), ("accel.stages.vae.graph_mode=segmented",), ("accel.loop=chain",)]
)
def test_graph_policies_of_every_mode_run(overrides: tuple[str, ...]) -> None:
    composed = Composer(CONF).compose(overrides)
    assert build(composed.tree, composed.source).accel.enable_cuda_graph


def test_measurement_works_without_files_or_console() -> None:
    measurement = run.Measurement(FakePipeline(digest=str), "request")
    measurement.run(repeats=2, profile=False)
    assert measurement.unequal == {"denoising.sample"}
    assert measurement.result == FakeResult({"denoising.sample": "0", "vae.latent": "same"})
    assert len(measurement.request.walls_ms) == 2
