"""`accel=auto` in every task that measures: the choice is made once, used, shown and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pipeline import CONFIG
from toy_pipeline import EAGER, FUSED, ToyPipeline, gates

from accel.fusion import registry
from accel.policy import AccelPolicy, StageOverride
from accel.selection import Candidate, Choice
from pipelines.auto_policy import AutoChoice
from tasks import arms, auto_choice, bench, profile, run, verify
from tasks.config import RunTask, TaskSettings, compose
from tasks.measurement_settings import BenchTask, ProfileTask, VerifyTask

AUTO = replace(FUSED, name="auto", enable_cuda_graph=True, auto_seconds=1.0)
CHOICE = AutoChoice(
    policy=replace(FUSED, name="auto", stages={"encoding": StageOverride(enable_cuda_graph=False, fused={})}),
    stages={"denoising": Choice(candidate=Candidate(fused=True), reason="saves 10.0 %, the most")},
    not_tried={},
    seconds=0.5,
)
TASKS: list[tuple[Any, TaskSettings, str]] = [
    (run, RunTask(name="run", repeats=1), "result.json"),
    (bench, BenchTask(name="bench", warmup=0, calls=1), "bench.json"),
    (verify, VerifyTask(name="verify", requests=1), "verify.json"),
    (profile, ProfileTask(name="profile", warmup=0, calls=1), "profile.json"),
]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[AccelPolicy]:
    """The policies of all pipelines that ran a request, in order."""
    ran: list[AccelPolicy] = []
    request = ToyPipeline.run

    def noted(pipeline: ToyPipeline, *args: Any, **options: Any) -> Any:
        ran.append(pipeline.policy)
        return request(pipeline, *args, **options)

    monkeypatch.setattr(ToyPipeline, "run", noted)
    monkeypatch.setattr(arms, "build", lambda config, *, progress: ToyPipeline(config.accel))
    monkeypatch.setattr(run, "build", lambda config, *, progress: ToyPipeline(config.accel))
    return ran


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any, TaskSettings, str], Any]:
    """Run a task with accel=auto in tmp_path and read its file."""

    def start(task: Any, settings: TaskSettings, file: str) -> Any:
        task.main(replace(CONFIG, accel=AUTO, task=settings), folder=tmp_path)
        return json.loads((tmp_path / file).read_text())

    return start


@pytest.mark.parametrize(("task", "settings", "file"), TASKS, ids=lambda value: getattr(value, "name", ""))
def test_a_task_goes_on_with_what_was_chosen(
    task: Any, settings: TaskSettings, file: str, bound, started, monkeypatch, tmp_path, capsys
) -> None:
    measured: list[tuple[Any, AccelPolicy]] = []

    def choose(pipeline: Any, request: Any, policy: AccelPolicy, *, progress: Any) -> AutoChoice:
        assert bound == []
        measured.append((request, policy))
        return CHOICE

    monkeypatch.setattr(auto_choice, "choose", choose)
    monkeypatch.setattr(registry, "gate", gates())
    found = started(task, settings, file)
    (measurement,) = measured
    assert measurement == (ToyPipeline().request_from(CONFIG), AUTO)
    accelerated = [policy for policy in bound if policy.name != "eager"]
    assert accelerated
    assert all(replace(policy, stages=CHOICE.policy.stages) == CHOICE.policy for policy in accelerated)
    assert found["status"] == "ok"
    assert found["choices"] == {"denoising": {"choice": "fused", "reason": "saves 10.0 %, the most"}}
    assert "denoising: fused" in capsys.readouterr().out
    kept = (tmp_path / "auto.yaml").read_text()
    assert "Chosen by accel=auto for toy, tiny, on CPU" in kept
    assert "auto_seconds: null" in kept


@pytest.mark.parametrize(("task", "settings", "file"), TASKS, ids=lambda value: getattr(value, "name", ""))
def test_without_cuda_everything_is_off_at_once(
    task: Any, settings: TaskSettings, file: str, bound, started
) -> None:
    found = started(task, settings, file)
    assert found["choices"] == {
        stage: {"choice": "off", "reason": "no_cuda"} for stage in ("encoding", "denoising")
    }
    assert not any(policy.enable_cuda_graph or any(policy.fused.values()) for policy in bound)


def test_other_policies_choose_nothing(bound, monkeypatch, tmp_path) -> None:
    settings = VerifyTask(name="verify", requests=1)
    verify.main(replace(CONFIG, accel=FUSED, task=settings), folder=tmp_path)
    assert json.loads((tmp_path / "verify.json").read_text())["choices"] == {}
    assert not (tmp_path / "auto.yaml").exists()


def test_a_pipeline_is_closed_when_measuring_fails(bound, monkeypatch, tmp_path) -> None:
    closed: list[str] = []
    monkeypatch.setattr(ToyPipeline, "close", lambda pipeline: closed.append(pipeline.policy.name))

    def choose(*_: Any, **__: Any) -> AutoChoice:
        raise KeyboardInterrupt

    monkeypatch.setattr(auto_choice, "choose", choose)
    with pytest.raises(KeyboardInterrupt):
        run.main(replace(CONFIG, accel=AUTO), folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        verify.main(replace(CONFIG, accel=AUTO, task=VerifyTask(name="verify")), folder=tmp_path)
    assert closed == ["auto", EAGER.name]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("task", ["run", "bench", "verify", "profile", "serve"])
def test_every_task_takes_auto(task: str) -> None:
    assert compose(f"task={task}", "accel=auto").accel.auto_seconds == 60
