"""What a comparison says of finished jobs: pairs, figures, bits, contention, exit code."""

from __future__ import annotations

import io
import re
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from sweep_examples import example_result, write_job

from accel.record import Reason
from tasks.comparison import compare, recorded_jobs
from tasks.comparison.outcomes import contending
from tasks.comparison.rows import rows_of
from tasks.comparison.tables import fallback_lines, note
from tasks.comparison.terminal import show
from tasks.job_record import JOB_FILE, JobRecord, read_record


def test_a_job_is_compared_with_the_eager_job_of_its_model_and_other_overrides(tmp_path: Path) -> None:
    jobs = [
        write_job(tmp_path, 0, "accel=graph", "seed=1", result=example_result(accel="graph", walls_ms=[2.0])),
        write_job(tmp_path, 1, "accel=eager", "seed=2", result=example_result(seed=2, walls_ms=[8.0])),
        write_job(tmp_path, 2, "accel=eager", "seed=1", result=example_result(walls_ms=[4.0])),
        write_job(tmp_path, 3, "accel=fused", "seed=3", result=example_result(accel="fused", seed=3)),
    ]
    rows = rows_of(jobs, tmp_path)
    assert [row.eager_job for row in rows] == [2, 1, 2, None]
    assert [[f.speed_up for f in row.figures] for row in rows] == [
        [2.0, 2.0, 2.0],
        [1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0],
        [None, None, None],
    ]
    assert [row.others for row in rows] == [("seed=1",), ("seed=2",), ("seed=1",), ("seed=3",)]


@pytest.mark.parametrize(
    "eager",
    [example_result(device="another CPU"), example_result(model="ltx2"), example_result(status="unequal")],
)
def test_other_work_other_devices_and_failures_are_no_yardstick(eager: object, tmp_path: Path) -> None:
    failed = "no luck" if eager.status == "unequal" else ""  # type: ignore[attr-defined]
    jobs = [
        write_job(tmp_path, 0, "accel=eager", result=eager, error=failed),  # type: ignore[arg-type]
        write_job(tmp_path, 1, "accel=graph", result=example_result(accel="graph")),
    ]
    row = rows_of(jobs, tmp_path)[1]
    assert (row.eager_job, row.figures[0].speed_up, row.figures[0].equal) == (None, None, None)


def test_figures_of_requests_and_stages(tmp_path: Path) -> None:
    result = example_result(walls_ms=[4.0, 4.0, 6.0], extra_bytes=4096, reason=Reason.NO_CUDA)
    job = write_job(tmp_path, 0, "accel=eager", result=result)
    request, encoding, denoising = rows_of([job], tmp_path)[0].figures
    assert (request.stage, encoding.stage, denoising.stage) == ("request", "text_encoding", "denoising")
    assert (request.p50_ms, request.cold_ms, denoising.p50_ms, denoising.cold_ms) == (4.0, 9.0, 3.0, 6.75)
    assert request.p95_ms == pytest.approx(5.8)
    assert (request.launches, request.host_launches, encoding.launches) == (200, 20, 100)
    assert (request.gpu_busy, denoising.gpu_busy) == (0.5, 0.5)
    assert (request.extra_bytes, denoising.extra_bytes) == (4096, 2048)
    assert [(f.text, f.detail, f.calls) for f in denoising.fallbacks] == [
        ("reference (no_cuda): swiglu", "on cpu", 3),
        ("eager (no_cuda)", "aten::item", 2),
    ]
    assert [f.calls for f in request.fallbacks] == [6, 4]


def test_what_was_switched_off_is_no_fallback(tmp_path: Path) -> None:
    job = write_job(tmp_path, 0, "accel=eager", result=example_result(reason=Reason.DISABLED))
    (row,) = rows_of([job], tmp_path)
    assert [figures.fallbacks for figures in row.figures] == [(), (), ()]


def test_other_bits_than_eager_are_named_and_fail_the_sweep(tmp_path: Path) -> None:
    other = {"text_encoding.text": "aa", "denoising.actions": "xx"}
    jobs = [
        write_job(tmp_path, 0, "accel=eager", result=example_result()),
        write_job(tmp_path, 1, "accel=graph", result=example_result(accel="graph", digests=other)),
    ]
    eager, graph = rows_of(jobs, tmp_path)
    assert [figures.equal for figures in eager.figures] == [True, True, True]
    assert [figures.equal for figures in graph.figures] == [False, True, False]
    assert (graph.unequal_outputs, graph.broken_promises) == (
        ("denoising.actions",),
        ("request", "denoising"),
    )
    assert note(graph) == "OTHER BITS than job 0 in denoising.actions"
    assert compare(jobs, tmp_path, logger="quiet") == 1


def test_a_tier_that_promises_no_equal_bits_breaks_no_promise(tmp_path: Path) -> None:
    other = {"text_encoding.text": "bb", "denoising.actions": "xx"}
    loose = example_result(accel="compile", digests=other)
    loose = replace(loose, stages=[stage | {"tier": "close"} for stage in loose.stages])
    jobs = [
        write_job(tmp_path, 0, "accel=eager", result=example_result()),
        write_job(tmp_path, 1, "accel=compile", result=loose),
    ]
    row = rows_of(jobs, tmp_path)[1]
    assert [(f.tier, f.equal) for f in row.figures] == [("close", False)] * 3
    assert compare(jobs, tmp_path, logger="quiet") == 0


def test_a_failed_job_is_a_row_and_fails_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        write_job(tmp_path, 0, "accel=eager", result=example_result()),
        write_job(tmp_path, 1, "accel=graph", error="ValueError: no luck\n\nTraceback"),
    ]
    row = rows_of(jobs, tmp_path)[1]
    assert (row.status, row.error, row.model, row.accel) == (
        "failed",
        "ValueError: no luck",
        "flux3_action",
        "graph",
    )
    assert compare(jobs, tmp_path, logger="quiet") == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "job 1 failed: ValueError: no luck",
        f"1 of 2 jobs succeeded; comparison in {tmp_path / 'comparison.html'}",
    ]


def test_jobs_of_other_tasks_have_a_status_by_their_own_file(tmp_path: Path) -> None:
    jobs = [
        write_job(tmp_path, number, "accel=graph", f"seed={number}", "task=verify") for number in range(3)
    ]
    (jobs[0].folder / "verify.json").write_text('{"status": "ok", "config_hash": "aa", "requests": []}')
    (jobs[1].folder / "verify.json").write_text('{"status": "interrupted", "config_hash": "bb"}')
    rows = rows_of(jobs, tmp_path)
    assert [(row.status, row.error, row.figures) for row in rows] == [
        ("ok", "", ()),
        ("interrupted", "", ()),
        ("no result", "wrote no verify.json that can be read", ()),
    ]
    assert compare(jobs[:1], tmp_path, logger="quiet") == 0
    assert "Latency of requests" not in (tmp_path / "comparison.html").read_text()


def test_jobs_that_a_sweeper_chose_are_found_by_number(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        write_job(tmp_path, number, "accel=eager", f"seed={number}")
    jobs = recorded_jobs(tmp_path)
    assert [(job.number, job.overrides[1]) for job in jobs] == [(2, "seed=2"), (9, "seed=9"), (10, "seed=10")]


RECORD = JobRecord(
    number=0,
    overrides=(),
    model="m",
    accel="eager",
    task="run",
    begin=10.0,
    end=20.0,
    machine="a",
    device="cpu",
)


@pytest.mark.parametrize(
    ("mine", "other", "contended"),
    [
        ({}, {"begin": 19.0, "end": 30.0}, True),
        ({}, {"begin": 20.0, "end": 30.0}, False),
        ({}, {"begin": 0.0, "end": 30.0}, True),
        ({}, {"machine": "b"}, False),
        ({}, {"device": "GPU-1"}, True),
        ({"device": "GPU-1"}, {"device": "GPU-1"}, True),
        ({"device": "GPU-1"}, {"device": "GPU-2"}, False),
        ({"device": "GPU-1"}, {"device": "cpu"}, False),
        ({}, {"begin": 1.0, "end": None}, True),
        ({}, {"begin": 40.0, "end": 50.0, "earlier": ((15.0, 40.0),)}, True),
        ({}, {"begin": 40.0, "end": 50.0, "earlier": ((21.0, 40.0),)}, False),
        ({"begin": 40.0, "end": 50.0, "earlier": ((15.0, 40.0),)}, {}, False),
    ],
)
def test_jobs_contend_that_overlap_on_one_device(
    mine: dict[str, object], other: dict[str, object], contended: bool
) -> None:
    first, second = replace(RECORD, **mine), replace(RECORD, number=1, **other)  # type: ignore[arg-type]
    assert contending(first, [first, second]) == ((1,) if contended else ())


def test_a_job_remembers_when_it_ran_before_it_was_killed(tmp_path: Path) -> None:
    """A sweep that is resumed would else forget whose times such a job has spoilt."""
    killed = replace(RECORD, begin=15.0, end=None)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / JOB_FILE).write_bytes(msgspec.json.encode(asdict(killed)))
    again = read_record(write_job(tmp_path, 0, "accel=graph").folder)
    assert again is not None
    assert again.earlier == ((15.0, again.begin),)
    third = read_record(write_job(tmp_path, 0, "accel=graph").folder)
    assert third is not None
    assert third.earlier == (*again.earlier, (again.begin, again.end))
    assert contending(RECORD, [replace(third, number=1, machine="a")]) == (1,)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_wider_than_the_terminal_are_shown_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = example_result(accel="graph+fused", walls_ms=[1234.0], reason=Reason.CAPTURE_FAILED)
    jobs = [write_job(tmp_path, 0, "accel=graph+fused", result=result)]
    terminal = Terminal()
    show(rows_of(jobs, tmp_path), tmp_path, logger="rich", file=terminal)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    (table,) = [n for n, line in enumerate(lines) if line == "flux3_action"]
    heads = [line.split() for line in lines[table:] if line.startswith("stage")]
    assert len(heads) > 1
    assert all(head[:3] == ["stage", "job", "accel"] for head in heads)
    assert any(line.startswith("request") and "1234" in line for line in lines)
    assert any("eager (capture_failed) x4" in line for line in lines if line.startswith(" "))


def test_plain_tables_are_never_wrapped(tmp_path: Path) -> None:
    long = "prompt=" + "red cube " * 40
    result = example_result(accel="graph", reason=Reason.CAPTURE_FAILED)
    jobs = [write_job(tmp_path, 0, "accel=eager"), write_job(tmp_path, 1, "accel=graph", long, result=result)]
    text = io.StringIO()
    rows = rows_of(jobs, tmp_path)
    show(rows, tmp_path, logger="rich", file=text)  # not a terminal: as plain
    lines = text.getvalue().splitlines()
    assert "\x1b" not in text.getvalue()
    assert any(long.strip() in line for line in lines)
    assert any(line.startswith("request ") and "4.00" in line and "50 %" in line for line in lines)
    assert fallback_lines(rows) == [
        "reference (capture_failed): swiglu x6: text_encoding, denoising in job 1; on cpu",
        "eager (capture_failed) x4: text_encoding, denoising in job 1; aten::item",
    ]
    assert all(f"  {line}" in lines for line in fallback_lines(rows))
