"""The `run` task around a pipeline that is not there: order, files, and every way it can end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from accel.errors import ConfigError, OutputError, StrictModeError, UnequalBitsError
from accel.policy import AccelPolicy
from accel.record import Kind, Outcome, Reason, RunRecord
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.pipeline import PipelineDescription
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.weights_config import WeightsConfig
from tasks import run
from tasks.config import LoggerConfig, RunConfig, RunTask, config_hash
from tasks.result_file import RESULT_FILE, read_result

ACCEL = AccelPolicy(
    name="graph+fused",
    enable_cuda_graph=True,
    graph_mode="full",
    max_entries=8,
    max_segments=256,
    on_full="eager",
    strict=False,
    fused={},
    stages={},
)
CONFIG = RunConfig(
    model=Flux3Settings(name="flux3_action"),
    accel=ACCEL,
    task=RunTask(name="run", repeats=3),
    weights=WeightsConfig(kind="synthetic"),
    logger=LoggerConfig(kind="plain"),
)


@dataclass
class FakeResult:
    digests: dict[str, str]


@dataclass
class FakePipeline:
    """`before(n)` runs at the start of request n = 0, 1, ...; `digest(n)` is its output."""

    before: Callable[[int], None] = lambda n: None
    digest: Callable[[int], str] = lambda n: "same"
    violations: list[str] = field(default_factory=list)
    record: RunRecord = field(default_factory=RunRecord)
    requests: int = 0
    closed: bool = False
    description = PipelineDescription(
        model="fake",
        size="tiny",
        size_reason="auto: no CUDA",
        weights="synthetic, seed 0",
        device="cpu",
        dtype="fp32",
        outputs_mean_nothing=True,
    )

    def run(self, request: str, *, progress: Progress = NULL_PROGRESS) -> FakeResult:
        number, self.requests = self.requests, self.requests + 1
        self.before(number)
        stage = self.record.stage("denoising")
        stage.add_wall(1.0 + number)
        stage.outcomes[Outcome(Kind.EAGER, Reason.NO_CUDA)] += 1
        return FakeResult({"denoising.sample": self.digest(number), "vae.latent": "same"})

    def profile(self, request: str) -> None:
        raise AssertionError("profiled without CUDA")

    def files(self, result: FakeResult, *, config_hash: str) -> dict[str, bytes]:
        return {"actions.npy": result.digests["denoising.sample"].encode()}

    def strict_violations(self) -> list[str]:
        return self.violations

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Run the task on a fake pipeline, in tmp_path."""

    def start(pipeline: FakePipeline, config: RunConfig = CONFIG) -> None:
        monkeypatch.setattr(run, "load", lambda config, *, progress: (pipeline, "request"))
        run.main(config, folder=tmp_path)

    return start


def interrupt_at(request: int) -> Callable[[int], None]:
    def before(number: int) -> None:
        if number == request:
            raise KeyboardInterrupt

    return before


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_writes_outputs_and_what_happened(start, tmp_path: Path, capsys) -> None:
    pipeline = FakePipeline()
    start(pipeline)
    result = read_result(tmp_path)
    assert (result.status, result.requests, result.unequal_outputs) == ("ok", 4, [])
    assert result.config["task"] == {"name": "run", "repeats": 3, "profile": "auto"}
    assert result.config_hash == config_hash(CONFIG)
    assert result.stages[0]["walls_ms"] == [2.0, 3.0, 4.0]
    assert result.digests["denoising.sample"] == "same"
    assert names(tmp_path) == ["actions.npy", RESULT_FILE]
    assert list(result.files) == ["actions.npy"]
    assert pipeline.closed
    text = capsys.readouterr().out
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
    with pytest.raises(UnequalBitsError, match=r"denoising\.sample\."):
        start(pipeline)
    result = read_result(tmp_path)
    assert (result.status, result.unequal_outputs) == ("unequal", ["denoising.sample"])
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


def test_profile_that_could_not_work_is_an_error(start, tmp_path: Path) -> None:
    pipeline = FakePipeline()
    with pytest.raises(ConfigError, match=r"task\.profile=true needs CUDA"):
        start(pipeline, replace(CONFIG, task=RunTask(name="run", profile=True)))
    assert pipeline.requests == 0
    assert pipeline.closed


def test_measurement_works_without_files_or_console() -> None:
    measurement = run.Measurement(FakePipeline(digest=str))
    measurement.run("request", repeats=2, profile=False)
    assert measurement.unequal == {"denoising.sample"}
    assert measurement.result == FakeResult({"denoising.sample": "0", "vae.latent": "same"})
    assert len(measurement.request.walls_ms) == 2
