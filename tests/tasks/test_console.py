"""What the user reads: header, table, refusals, and no escapes where there is no terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from fake_pipeline import ACCEL

from accel.record import Kind, Outcome, Reason, RunRecord, SiteOutcome, StageRecord
from accel.selection import Candidate, Choice, Measured
from accel.site_names import FUSED_NAMES, SITE_NAMES
from pipelines.auto_policy import AutoChoice
from pipelines.pipeline import PipelineDescription
from tasks.console import RunConsole
from tasks.environment import device_facts, software
from tasks.stage_table import refusals, stage_rows, total_row

SITES = ("swiglu", "modulate", "gated_residual", "qk_norm_rope")
POLICY = replace(ACCEL, fused=dict.fromkeys(SITES, True))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def timed(record: StageRecord, *walls: float) -> StageRecord:
    for wall in walls:
        record.add_wall(wall)
    return record


def cpu_record() -> RunRecord:
    record = RunRecord()
    for name in ("text_encoding", "observation_encoding", "denoising"):
        stage = timed(record.stage(name), 30.0, *(10.0 + n for n in range(5)))
        stage.outcomes[Outcome(Kind.EAGER, Reason.NO_CUDA)] = 24
        for site in SITES:
            stage.sites[SiteOutcome(site, False, Reason.NO_CUDA)] = 8
    timed(record.stage("action_decoding"), 0.1, *[0.05] * 5)
    return record


def cuda_record() -> RunRecord:
    record = RunRecord()
    stage = timed(record.stage("denoising"), 900.0, *[100.0] * 5)
    stage.outcomes[Outcome(Kind.REPLAYED)] = 20
    stage.outcomes[Outcome(Kind.CAPTURED)] = 4
    stage.outcomes[Outcome(Kind.EAGER, Reason.CAPTURE_FAILED, "aten::item in velocity")] = 1
    stage.outcomes[Outcome(Kind.EAGER, Reason.CAPTURE_FAILED, "aten::nonzero in velocity")] = 1
    for site in SITES[:3]:
        stage.sites[SiteOutcome(site, True)] = 8
    stage.sites[SiteOutcome("qk_norm_rope", False, Reason.MISMATCH, "index 3: 0x3f81 vs 0x3f80")] = 8
    stage.launches, stage.host_launches, stage.gpu_busy_ms = 1234, 7, 93.0
    stage.extra_bytes = 123 * 2**20
    return record


def shown(
    record: RunRecord, *, kind: str = "plain", file: io.StringIO | None = None, unequal=(), not_worth_it=()
) -> str:
    file = file or io.StringIO()
    with RunConsole(kind, file=file) as console:
        request = timed(StageRecord("request"), 920.0, *[110.0] * 5)
        console.report(record, request, unequal=unequal, not_worth_it=not_worth_it)
    return file.getvalue()


def line(text: str, start: str) -> str:
    return next(row for row in text.splitlines() if row.startswith(start))


def test_the_header_promises_nothing_that_is_still_to_be_chosen() -> None:
    out = io.StringIO()
    auto = replace(POLICY, name="auto", auto_seconds=60.0)
    RunConsole("plain", file=out).header(config_hash="ab", accel=auto, software=software())
    assert "auto, tier exact (chosen by measuring, auto_seconds=60)" in out.getvalue()


def test_a_choice_says_what_was_measured_how_often_and_what_was_not() -> None:
    out = io.StringIO()
    measured = Measured(relative=0.3, calls=2, held_bytes=3 << 20)
    full = Candidate(graphs="full")
    chosen = Choice(candidate=full, reason="saves 70.0 %, the most", measured=measured, eager_ms=100.0)
    choice = AutoChoice(
        policy=POLICY, stages={"vae": chosen}, not_tried={Candidate(fused=True): "no time left"}, seconds=9.0
    )
    RunConsole("plain", file=out).choice(choice)
    assert "saves 70.0 %, the most (30.00 ms, eager 100.00; medians of 2, 3 MiB held)" in out.getvalue()
    assert "not tried: fused: no time left" in out.getvalue()


@pytest.mark.parametrize(
    ("off", "on", "expected"),
    [
        ((), (), "fused: all sites)"),
        (("swiglu", "modulate"), (), "fused: all sites but modulate, swiglu)"),
        (SITE_NAMES[1:], (), "fused: modulate)"),
        (SITE_NAMES, (), "fused: nothing)"),
        (("swiglu",), ("batched_guidance",), "fused: all sites but swiglu; savings: batched_guidance)"),
    ],
)
def test_the_header_says_in_few_words_what_may_be_fused(off, on, expected: str) -> None:
    out = io.StringIO()
    switches = {name: (name in SITE_NAMES and name not in off) or name in on for name in FUSED_NAMES}
    RunConsole("plain", file=out).header(
        config_hash="ab", accel=replace(POLICY, fused=switches), software=software()
    )
    assert expected in out.getvalue()


def test_cpu_run_says_why_nothing_was_accelerated() -> None:
    text = shown(cpu_record())
    row = line(text, "observation_encoding")
    assert row.split() == [
        "observation_encoding",
        *("12.0", "13.8", "30.0"),
        *("eager", "(no_cuda)"),
        *("reference", "(no_cuda)"),
    ]
    assert "launches" not in text
    assert "eager (no_cuda) x72: text_encoding, observation_encoding, denoising" in text


def test_total_row_is_the_whole_request() -> None:
    assert line(shown(cpu_record()), "total").split() == ["total", "110.0", "110.0", "920.0"]


def test_cuda_run_shows_launches_busy_share_and_memory() -> None:
    text = shown(cuda_record())
    assert line(text, "denoising").split() == [
        "denoising",
        "100.0",
        "100.0",
        "900.0",
        "1,234",
        "7",
        "93",
        "%",
        "123",
    ]
    assert "extra MiB" in text
    assert "20 replayed, 4 captured," in text
    assert "2 eager (capture_failed)" in text


def test_refusals_name_reason_detail_and_site() -> None:
    text = shown(cuda_record())
    assert "eager (capture_failed) x1: denoising\n      aten::item in velocity" in text
    assert "reference (mismatch) x8: qk_norm_rope in denoising\n      index 3: 0x3f81 vs 0x3f80" in text


def test_switched_off_is_not_a_refusal() -> None:
    record = RunRecord()
    stage = timed(record.stage("denoising"), 1.0, 1.0)
    stage.outcomes[Outcome(Kind.EAGER, Reason.DISABLED)] = 4
    stage.sites[SiteOutcome("swiglu", False, Reason.DISABLED)] = 4
    assert refusals(record) == []
    (row,) = stage_rows(record)
    assert (row.graphs, row.fused) == ("eager (disabled)", "reference (disabled)")


def test_unequal_repeats_are_said() -> None:
    text = shown(cpu_record(), unequal=["denoising.video_tokens"])
    assert "UNEQUAL between 6 like requests: denoising.video_tokens" in text
    assert "all outputs equal" not in text
    assert "6 like requests: all outputs equal, bit for bit" in shown(cpu_record())


def test_breaks_are_listed_by_place_and_counted() -> None:
    record = cuda_record()
    stage = record.stage("denoising")
    stage.breaks = ["model.py:12 aten::item (automatic)"] * 4 + ["model.py:30 route (declared)"]
    text = shown(record)
    assert "Breaks between graphs\n  denoising: model.py:12 aten::item (automatic) x4\n" in text
    assert "  denoising: model.py:30 route (declared)\n" in text
    assert "Breaks" not in shown(cuda_record())


def test_many_breaks_are_cut_short() -> None:
    record = cuda_record()
    record.stage("denoising").breaks = [f"model.py:{n} aten::item (automatic)" for n in range(300)]
    text = shown(record)
    assert text.count("aten::item (automatic)") == 12
    assert "  and 288 more places; all are in result.json\n" in text


def test_graphs_kept_and_evicted_are_counted_where_there_are_any() -> None:
    record = cuda_record()
    assert "Graphs" not in shown(record)
    record.stage("denoising").entries, record.stage("vae").entries = 2, 1
    assert "Graphs\n  kept: denoising 2, vae 1\n" in shown(record)
    assert "evicted" not in shown(record)
    record.stage("denoising").evictions = 3
    assert "  evicted: denoising 3\n" in shown(record)


def test_graphs_that_gain_little_are_named() -> None:
    line = "vae.encode saves 1 %: 10.20 ms, eager 10.30 ms"
    assert f"Graphs that gain little\n  {line}\n" in shown(cuda_record(), not_worth_it=[line])
    assert "gain little" not in shown(cuda_record())


def test_cold_request_alone_has_a_table_too() -> None:
    record = RunRecord()
    timed(record.stage("denoising"), 12.5)
    row = total_row(record, timed(StageRecord("request"), 13.0))
    assert (row.p50, row.p95, row.cold) == ("-", "-", "13.0")


@pytest.mark.parametrize("record", [cpu_record(), cuda_record()], ids=["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_piped_output_is_plain_and_80_columns_wide(record: RunRecord, kind: str) -> None:
    text = shown(record, kind=kind)
    assert "\x1b" not in text
    assert "…" not in text
    assert all(
        len(row) <= 80 for row in text.splitlines() if "not accelerated" not in row and " x" not in row
    )


def test_environment_variables_do_not_change_plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    before = shown(cuda_record())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert shown(cuda_record()) == before


def test_terminal_gets_bars_and_colour() -> None:
    file = Terminal()
    with RunConsole("rich", file=file) as console:
        console.progress.start("loading", 2)
        console.progress.advance("loading", 2)
        console.progress.finish("loading")
    assert "loading" in file.getvalue()
    assert "2/2" in file.getvalue()
    assert "\x1b" in file.getvalue()


def test_plain_progress_is_a_line_at_start_and_end_of_a_piece() -> None:
    file = io.StringIO()
    with RunConsole("plain", file=file) as console:
        console.progress.start("warm-up", 1)
        console.progress.start("denoising", 4)
        console.progress.advance("denoising", 4)
        console.progress.finish("denoising")
        console.progress.advance("warm-up")
        console.progress.finish("warm-up")
    assert [row.split()[:4] for row in file.getvalue().splitlines()] == [
        ["warm-up", "0", "of", "1"],
        ["denoising", "0", "of", "4"],
        ["denoising", "4", "of", "4"],
        ["warm-up", "1", "of", "1"],
    ]


def test_quiet_prints_the_folder_alone() -> None:
    file = io.StringIO()
    shown(cpu_record(), kind="quiet", file=file)
    with RunConsole("quiet", file=file) as console:
        console.header(config_hash="ab", accel=POLICY, software=software())
        console.progress.start("loading", 1)
        console.progress.finish("loading")
        console.written(Path("outputs/1"), ["actions.npy"])
    assert file.getvalue() == "outputs/1\n"


def test_numbered_files_are_named_by_the_first_and_the_last() -> None:
    file = io.StringIO()
    frames = [f"frame_{number:04d}.png" for number in range(121)]
    RunConsole("plain", file=file).written(Path("out"), ["a_0.mp4", "a_1.mp4", *frames, "sound.wav"])
    assert file.getvalue() == "Wrote a_0.mp4, a_1.mp4, frame_0000.png to frame_0120.png, sound.wav\nout\n"


def test_header_says_what_runs_and_what_it_is_worth() -> None:
    file = io.StringIO()
    description = PipelineDescription(
        model="flux3_action",
        size="tiny",
        size_reason="auto: no CUDA",
        weights="synthetic, seed 0",
        device="cpu",
        dtype="fp32",
        outputs_mean_nothing=True,
    )
    with RunConsole("plain", file=file) as console:
        console.header(config_hash="0123456789ab", accel=POLICY, software=software())
        console.pipeline(description, device_facts("cpu"))
    text = file.getvalue()
    for part in (
        "0123456789ab",
        "graph+fused, tier exact",
        "torch 2",
        "flux3_action, size tiny (auto: no CUDA)",
        "cpu,",
    ):
        assert part in text
    assert "the outputs mean nothing" in text


def test_environment_names_no_host_user_or_home() -> None:
    import getpass
    import socket

    text = f"{software()} {device_facts('cpu')}"
    assert socket.gethostname() not in text
    assert str(Path.home()) + "/" not in text
    assert f"/{getpass.getuser()}" not in text
