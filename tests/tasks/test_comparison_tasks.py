"""What a comparison says of jobs that bench, verify or profile, and of what accel=auto chose."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pipeline import CONFIG
from sweep_examples import example_result, policy, write_job
from toy_pipeline import FUSED, Denoising, ToyPipeline, ToyRequest, gates

from accel.fusion import registry
from accel.policy import AccelPolicy
from accel.record import Reason, StageRecord
from tasks import arms, bench, profile, verify
from tasks.comparison import compare
from tasks.comparison.rows import JobRow, rows_of
from tasks.comparison.tables import bits, note
from tasks.config import TaskSettings
from tasks.measurement_settings import BenchTask, ProfileTask, VerifyTask
from tasks.sweep import Job, run_isolated

BENCH = BenchTask(name="bench", warmup=0, calls=3)
VERIFY = VerifyTask(name="verify", requests=1)
PROFILE = ProfileTask(name="profile", warmup=0, calls=3)
STAGES = ["request", "encoding", "denoising"]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., JobRow]:
    """Run one job of a sweep on a small pipeline; its row."""
    tasks: dict[str, Any] = {"bench": bench, "verify": verify, "profile": profile}

    def run(settings: TaskSettings, accel: AccelPolicy = FUSED, **toy: Any) -> JobRow:
        monkeypatch.setattr(arms, "build", lambda config, *, progress: ToyPipeline(config.accel, **toy))
        number = len(list(tmp_path.iterdir()))
        config = replace(CONFIG, accel=accel, task=settings)
        job = write_job(tmp_path, number, f"accel={accel.name}", f"task={settings.name}")
        run_isolated(lambda: tasks[settings.name].main(config, folder=job.folder), job.folder)
        (row,) = rows_of([job], tmp_path)
        return row

    return run


@contextmanager
def edited(file: Path) -> Iterator[Any]:
    """The content of a JSON file, to be changed."""
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


def offset(stage: Denoising, request: ToyRequest) -> None:
    stage.offset += 1


def test_a_bench_job_has_the_speed_up_over_its_own_reference(sweep, tmp_path: Path) -> None:
    row = sweep(BENCH)
    written = json.loads((tmp_path / "0" / "bench.json").read_text())
    assert (row.status, row.task, row.eager_job, row.compared_with) == ("ok", "bench", None, "eager")
    assert [figures.stage for figures in row.figures] == STAGES
    assert [figures.speed_up for figures in row.figures] == [
        written["speed_up"][name] for name in ("total", "encoding", "denoising")
    ]
    fused = written["arms"]["fused"]
    assert row.figures[0].p50_ms == fused[-1]["latency_ms"]["p50"]
    assert row.figures[2].cold_ms == fused[1]["cold_ms"]
    assert [figures.equal for figures in row.figures] == [True] * 3
    assert row.figures[2].fallbacks[0].reason == "no_cuda"
    assert note(row) == "beside eager in its own process"


def test_bits_that_a_bench_job_found_unequal(sweep, monkeypatch) -> None:
    wrong = iter([False] * 20)  # long after the kernel was verified
    monkeypatch.setattr(registry, "gate", gates(gated_residual=lambda *_: next(wrong, True)))
    row = sweep(replace(BENCH, calls=40))
    assert row.status == "failed"
    assert (row.unequal_outputs, row.broken_promises) == (("denoising.sample",), ("request", "denoising"))
    assert [figures.equal for figures in row.figures] == [False, True, False]
    assert "OTHER BITS than eager in denoising.sample" in note(row)
    assert row.figures[1].relative_error is None
    assert row.figures[0].relative_error == row.figures[2].relative_error > 0
    assert bits(row.figures[2]) == f"OTHER ({row.figures[2].relative_error:.1e})"


def test_an_error_that_no_number_tells_hides_no_other(sweep, tmp_path: Path) -> None:
    sweep(BENCH, before=offset)
    with edited(tmp_path / "0" / "bench.json") as content:
        content["relative_errors"]["encoding.tokens"] = None
    (row,) = rows_of([Job(("accel=fused",), tmp_path / "0")], tmp_path)
    assert [figures.relative_error is None for figures in row.figures] == [True, True, False]


def test_a_verify_job_has_its_verdict_and_no_times(sweep, monkeypatch) -> None:
    monkeypatch.setattr(registry, "gate", gates())
    row = sweep(VERIFY)
    assert (row.status, row.compared_with) == ("ok", "eager")
    assert [(figures.stage, figures.equal) for figures in row.figures] == [(name, True) for name in STAGES]
    assert {(f.p50_ms, f.cold_ms, f.speed_up) for f in row.figures} == {(None, None, None)}
    assert note(row) == "1 requests, 2 comparisons with eager"


def test_a_verify_job_that_proves_nothing_says_so(sweep) -> None:
    assert note(sweep(VERIFY)).endswith("nothing was accelerated, so that this proves nothing")


def test_a_verify_job_knows_the_first_difference_alone(sweep, tmp_path: Path) -> None:
    sweep(VERIFY)
    with edited(tmp_path / "0" / "verify.json") as content:
        content["comparisons"][1]["difference"] = {"stage": "encoding", "field": "tokens"}
    (row,) = rows_of([Job(("accel=fused",), tmp_path / "0")], tmp_path)
    assert [figures.equal for figures in row.figures] == [False, False, None]
    assert row.unequal_outputs == ("encoding.tokens",)


def test_other_files_alone_break_the_promise_of_a_whole_request(sweep) -> None:
    row = sweep(VERIFY, file=lambda pipeline: pipeline.policy.name.encode())
    assert [figures.equal for figures in row.figures] == [False, True, True]
    assert (row.broken_promises, row.unequal_outputs) == (("request",), ("files.toy.bin",))


def test_profile_jobs_have_times(sweep, tmp_path: Path) -> None:
    row = sweep(PROFILE)
    assert [figures.stage for figures in row.figures] == STAGES
    assert all(figures.p50_ms and figures.cold_ms for figures in row.figures)
    assert (row.figures[0].equal, row.figures[0].launches) == (None, None)


def test_what_a_gpu_was_seen_to_do_is_taken_from_the_profile(sweep, tmp_path: Path) -> None:
    sweep(PROFILE)
    with edited(tmp_path / "0" / "profile.json") as content:
        for stage, record in zip(content["stages"], content["record"], strict=True):
            stage |= {"idle_ms": 1.0, "busy_ms": 3.0, "kernels": [{"calls": 5}, {"calls": 2}]}
            record["walls_ms"] = [4.0]
    (row,) = rows_of([Job(("accel=fused",), tmp_path / "0")], tmp_path)
    assert [(f.launches, f.gpu_busy) for f in row.figures[1:]] == [(7, 0.75)] * 2


def test_one_comparison_of_all_tasks_is_written_and_fails_for_those_that_failed(
    sweep, tmp_path: Path, capsys
) -> None:
    for settings in (BENCH, VERIFY, PROFILE):
        sweep(settings)
    jobs = [Job((), tmp_path / str(number), number) for number in range(3)]
    assert compare(jobs, tmp_path, logger="plain") == 0
    assert "beside eager in its own process" in capsys.readouterr().out
    with open(tmp_path / "comparison.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["task"] for line in lines[::3]] == ["bench", "verify", "profile"]
    assert lines[3]["note"].startswith("1 requests, 2 comparisons")
    assert "Latency of requests" in (tmp_path / "comparison.html").read_text()


@pytest.mark.parametrize("text", ["", "{}", '{"status": "ok", "config_hash": "aa"}', "[1"])
def test_a_file_that_says_too_little_is_no_result(text: str, tmp_path: Path) -> None:
    job = write_job(tmp_path, 0, "accel=graph", "task=bench")
    (job.folder / "bench.json").write_text(text)
    assert rows_of([job], tmp_path)[0].figures == ()


def test_what_auto_chose_stands_beside_the_fixed_choices(tmp_path: Path, capsys) -> None:
    chosen = {
        "text_encoding": {"choice": "off", "reason": "nothing is faster"},
        "denoising": {"choice": "full graphs (loop: whole) + fused", "reason": "saves 41.3 %, the most"},
    }
    auto = replace(example_result(accel="auto", walls_ms=[2.0]), choices=chosen)
    jobs = [
        write_job(tmp_path, 0, "accel=eager", result=example_result(walls_ms=[4.0])),
        write_job(tmp_path, 1, "accel=auto", result=auto),
    ]
    assert compare(jobs, tmp_path, logger="plain") == 0
    words = "chosen: text_encoding off, denoising full graphs (loop: whole) + fused"
    assert words in capsys.readouterr().out
    assert words in (tmp_path / "comparison.md").read_text()
    assert words in (tmp_path / "comparison.html").read_text()
    _, row = json.loads((tmp_path / "comparison.json").read_text())["jobs"]
    assert row["choices"] == chosen
    assert row["figures"][0]["speed_up"] == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {"fused": {"swiglu": True}},
        {"enable_cuda_graph": True},
        {"stages": {"vae": {"enable_cuda_graph": None, "compile": "default", "fused": {}}}},
    ],
)
def test_eager_with_something_switched_on_is_no_yardstick(changes: dict[str, Any], tmp_path: Path) -> None:
    almost = example_result()
    almost.config["accel"] = policy("eager", **changes)
    jobs = [
        write_job(tmp_path, 0, "accel=eager", result=almost),
        write_job(tmp_path, 1, "accel=graph", result=example_result(accel="graph")),
    ]
    assert [row.eager_job for row in rows_of(jobs, tmp_path)] == [None, None]


def test_stages_after_one_that_may_differ_break_no_promise(tmp_path: Path) -> None:
    other = {"text_encoding.text": "bb", "denoising.actions": "xx"}
    result = example_result(accel="compile", digests=other)
    result.stages[0]["tier"] = "compiled"
    jobs = [
        write_job(tmp_path, 0, "accel=eager", result=example_result()),
        write_job(tmp_path, 1, "accel=compile", result=result),
    ]
    row = rows_of(jobs, tmp_path)[1]
    assert [(f.tier, f.equal) for f in row.figures[1:]] == [("compiled", False), ("exact", False)]
    assert row.broken_promises == ()
    assert compare(jobs, tmp_path, logger="quiet") == 0


def test_blocks_that_were_not_mounted_are_fallbacks(tmp_path: Path) -> None:
    result = example_result()
    record = StageRecord("text_encoding").to_dict()
    record["mounts"] = [
        {"block": "resnet", "blocks": 4, "mounted": False, "reason": "no_cuda", "detail": "on cpu"}
    ]
    result = replace(result, stages=[record, *result.stages[1:]])
    (row,) = rows_of([write_job(tmp_path, 0, "accel=fused", result=result)], tmp_path)
    (fallback,) = row.figures[1].fallbacks
    assert (fallback.text, fallback.calls) == (f"not mounted ({Reason.NO_CUDA.value}): resnet", 4)
