"""`task=bench` on a small pipeline: the order of calls, the numbers, the files, and every way it can end."""

from __future__ import annotations

import errno
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_pipeline import CONFIG
from toy_pipeline import EAGER, FUSED, GRAPHS, Denoising, ToyPipeline, ToyRequest, gates

from accel.errors import ConfigError, OutputError, StrictModeError, UnequalBitsError
from accel.fusion import registry
from accel.policy import AccelPolicy
from accel.record import StageRecord
from tasks import arms, bench
from tasks.bench import BENCH_FILE, arm_names
from tasks.bench_table import BenchReport, Timing, bench_markdown
from tasks.config import compose
from tasks.differences import relative_error
from tasks.gpu_state import GpuState, parse_state
from tasks.latency import Histogram, Latency, speed_up
from tasks.measurement_settings import BenchTask
from tasks.number_text import milliseconds
from tasks.sweep import folder_name

ROOT = Path(__file__).resolve().parents[2]
TASK = BenchTask(name="bench", warmup=1, calls=4)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the task in tmp_path and read its file."""

    def start(pipeline: ToyPipeline, policy: AccelPolicy = FUSED, task: BenchTask = TASK) -> dict[str, Any]:
        monkeypatch.setattr(arms, "build", lambda config, *, progress: pipeline)
        bench.main(replace(CONFIG, accel=policy, task=task), folder=tmp_path)
        return report(tmp_path)

    return start


def report(folder: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((folder / BENCH_FILE).read_text())
    return written


class Order:
    """Which arm ran, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, interrupt_at: int | None = None) -> None:
        self.arms = ""
        run = ToyPipeline.run

        def noted(pipeline: ToyPipeline, request: ToyRequest, **options: Any) -> Any:
            if len(self.arms) == interrupt_at:
                raise KeyboardInterrupt
            self.arms += "A" if pipeline.policy.name == "eager" else "B"
            return run(pipeline, request, **options)

        monkeypatch.setattr(ToyPipeline, "run", noted)


def test_arms_are_warmed_up_and_then_timed_in_turn(start, monkeypatch) -> None:
    order = Order(monkeypatch)
    found = start(ToyPipeline())
    assert order.arms == "AB" + "AB" + "ABBAABBA" + "AB"
    assert (found["status"], found["against"], found["unequal_outputs"]) == ("ok", "eager", [])
    for name in ("eager", "fused"):
        timings = found["arms"][name]
        assert [timing["name"] for timing in timings] == ["encoding", "denoising", "total"]
        assert [len(timing["walls_ms"]) for timing in timings] == [4, 4, 4]
        assert all(timing["cold_ms"] > 0 for timing in timings)
        encoding, denoising, total = timings
        for stages, whole in zip(
            zip(encoding["walls_ms"], denoising["walls_ms"], strict=True), total["walls_ms"], strict=True
        ):
            assert 0 < sum(stages) < whole
        latency = total["latency_ms"]
        assert latency["calls"] == 4
        assert latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    p50 = {name: found["arms"][name][-1]["latency_ms"]["p50"] for name in found["arms"]}
    assert found["speed_up"]["total"] == p50["eager"] / p50["fused"]
    assert {name: sum(counts) for name, counts in found["histogram"]["counts"].items()} == {
        "eager": 4,
        "fused": 4,
    }


def test_what_is_shown_and_written(start, tmp_path, capsys) -> None:
    found = start(ToyPipeline())
    assert {path.name for path in tmp_path.iterdir()} == {BENCH_FILE, "bench.md"}
    text, page = capsys.readouterr().out, (tmp_path / "bench.md").read_text()
    for shown in (text, page):
        assert "speed-up" in shown
        assert "denoising" in shown
    assert page.startswith("# toy, tiny, float32, CPU\n")
    assert "reference (no_cuda)" in text
    assert found["gpu"]["after"]["unavailable"] == "cpu is no GPU"
    assert found["environment"]["device"]["name"] == "CPU"


def test_a_trace_has_a_range_for_every_stage(start, tmp_path) -> None:
    start(ToyPipeline(), task=replace(TASK, trace=True))
    for arm in ("eager", "fused"):
        trace = json.loads(gzip.decompress((tmp_path / f"trace_{arm}.json.gz").read_bytes()))
        ranges = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
        assert ranges == ["stage encoding", "stage denoising"]
        assert "aten::addmm" in {event["name"] for event in trace["traceEvents"]}


def test_a_policy_whose_name_is_no_file_name_has_a_trace(start, tmp_path) -> None:
    start(ToyPipeline(), replace(FUSED, name="mine/fused"), task=replace(TASK, trace=True))
    names = sorted(path.name for path in tmp_path.glob("trace_*.json.gz"))
    assert names == ["trace_eager.json.gz", f"trace_{folder_name('mine/fused')}.json.gz"]


def test_a_full_disk_costs_the_trace_alone(start, monkeypatch, tmp_path) -> None:
    def full(*_: Any, **__: Any) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bench, "chrome_trace", full)
    with pytest.raises(OutputError, match="No trace could be made: No space left on device"):
        start(ToyPipeline(), task=replace(TASK, trace=True))
    assert {path.name for path in tmp_path.iterdir()} == {BENCH_FILE, "bench.md"}
    assert len(report(tmp_path)["arms"]["fused"][-1]["walls_ms"]) == TASK.calls


@pytest.mark.parametrize(("calls", "timed"), [(3, (0, 0)), (6, (1, 1)), (7, (1, 2))])
def test_ctrl_c_keeps_what_was_measured(start, monkeypatch, tmp_path, capsys, calls, timed) -> None:
    Order(monkeypatch, interrupt_at=calls)
    with pytest.raises(KeyboardInterrupt):
        start(ToyPipeline())
    found = report(tmp_path)
    assert found["status"] == "interrupted"
    assert tuple(len(found["arms"][arm][-1]["walls_ms"]) for arm in ("eager", "fused")) == timed
    assert "Interrupted" in capsys.readouterr().out
    assert (tmp_path / "bench.md").exists()


def test_ctrl_c_before_the_other_arm_ran_compares_nothing(start, monkeypatch, tmp_path) -> None:
    Order(monkeypatch, interrupt_at=1)
    with pytest.raises(KeyboardInterrupt):
        start(ToyPipeline())
    assert report(tmp_path)["unequal_outputs"] is None
    assert "equal" not in (tmp_path / "bench.md").read_text()


def test_unequal_arms_are_an_error_after_everything_is_written(start, monkeypatch, tmp_path, capsys) -> None:
    wrong = iter([False] * 100)
    monkeypatch.setattr(registry, "gate", gates(gated_residual=lambda *_: next(wrong, True)))
    pipeline = ToyPipeline()
    with pytest.raises(UnequalBitsError, match=r"denoising\.sample\. Run task=verify"):
        start(pipeline, task=replace(TASK, calls=100))
    found = report(tmp_path)
    assert (found["status"], found["unequal_outputs"]) == ("unequal", ["denoising.sample"])
    error = found["relative_errors"]["denoising.sample"]
    assert 0 < error < 1e-6
    assert f"UNEQUAL bits: denoising.sample (relative error {error:.1e})." in capsys.readouterr().out


def test_strict_fails_after_everything_is_written(start, tmp_path) -> None:
    with pytest.raises(StrictModeError, match="no_cuda"):
        start(ToyPipeline(), replace(GRAPHS, strict=True))
    assert report(tmp_path)["status"] == "not_strict"


def test_a_second_run_does_not_replace_the_first(start, tmp_path) -> None:
    start(ToyPipeline())
    with pytest.raises(OutputError, match="already holds a result"):
        start(ToyPipeline())


@pytest.mark.parametrize("name", ["eager", "graph"])
def test_like_arms_are_refused_on_the_command_line(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"task\.against={name} and accel={name} are the same"):
        compose("task=bench", f"accel={name}", f"task.against={name}")
    assert compose("task=bench", f"accel={name}", f"task.against={name}", "accel.max_entries=2")


def test_two_settings_of_one_choice_have_names_of_their_own() -> None:
    assert arm_names(GRAPHS, replace(GRAPHS, loop="chain")) == ("graph", "graph (changed)")
    assert arm_names(EAGER, GRAPHS) == ("eager", "graph")


def test_a_compiled_arm_may_differ(monkeypatch) -> None:
    def offset(stage: Denoising, request: ToyRequest) -> None:
        stage.offset += 1

    eager, other = ToyPipeline(before=offset), ToyPipeline(FUSED)
    found = bench.Bench(bench.TimedArm("eager", eager), bench.TimedArm("other", other), eager._device)
    found.run(ToyRequest(), warmup=0, calls=1)
    assert found.unequal == ["denoising.sample"]
    assert found.breaks_promise
    monkeypatch.setattr(bench, "breaks_promise", lambda stage, record: record is not other.record)
    assert not found.breaks_promise


def test_latencies() -> None:
    latency = Latency.of([float(n) for n in range(101)])
    assert latency == Latency(calls=101, p50=50.0, p90=90.0, p99=99.0, max=100.0)
    assert Latency.of([]) is None
    assert speed_up(latency, Latency(calls=1, p50=25.0, p90=25.0, p99=25.0, max=25.0)) == 2.0
    assert speed_up(latency, None) is None
    assert [milliseconds(v) for v in (None, 0.123, 12.34, 1234.5)] == ["-", "0.12", "12.3", "1234"]


@pytest.mark.parametrize(
    ("expected", "actual", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.0], [3.0, 4.5], 0.1),
        ([0.0], [1.0], None),
        ([1.0], [float("nan")], None),
        ([1.0], [1.0, 2.0], None),
    ],
)
def test_relative_errors(expected: list[float], actual: list[float], error: float | None) -> None:
    assert relative_error(torch.tensor(expected), torch.tensor(actual)) == error


def test_relative_errors_are_over_all_tensors_of_an_output_whatever_their_type() -> None:
    expected = {"frames": torch.tensor([3], dtype=torch.uint8), "sound": torch.tensor([4.0]).bfloat16()}
    actual = {"frames": torch.tensor([0], dtype=torch.uint8), "sound": torch.tensor([0.0]).bfloat16()}
    assert relative_error(expected, actual) == 1.0


def test_histograms_share_their_bins() -> None:
    histogram = Histogram.of({"a": [0.0, 1.0, 1.0], "b": [10.0]}, bins=2)
    assert histogram == Histogram([0.0, 5.0, 10.0], {"a": [3, 0], "b": [0, 1]})
    empty = Histogram.of({"a": [], "b": []}, bins=2)
    assert empty.counts == {"a": [0, 0], "b": [0, 0]}


def test_markdown_has_every_number_of_a_gpu() -> None:
    record = StageRecord("vae", launches=120, host_launches=3, gpu_busy_ms=4.5, extra_bytes=7 * 2**20)
    arms = {
        "eager": [Timing(name="vae", cold_ms=20.0, walls_ms=[10.0], record=record)],
        "graph": [Timing(name="vae", cold_ms=90.0, walls_ms=[5.0], record=record)],
    }
    throttled = parse_state("1980 MHz, 1980 MHz, 2619 MHz, 40, 300.00 W, P0, 0x0000000000000024\n")
    page = bench_markdown(
        BenchReport(arms=arms, unequal=["vae.latents"], states={"after": throttled}), title="t"
    )
    assert "| vae | graph | 5.00 | 5.00 | 5.00 | 5.00 | 2.00 x |" in page
    assert "| vae | graph | 90.0 | 120 | 3 | 90 % | 7 | - | exact | UNEQUAL |" in page
    assert "slowed down after the calls: power cap, software thermal slowdown" in page


def test_the_state_of_a_gpu_is_read_or_its_absence_explained() -> None:
    idle = parse_state("210 MHz, 1980 MHz, 2619 MHz, 30, 75.10 W, P0, 0x0000000000000001")
    assert (idle.values["clocks.sm"], idle.clock_limits, idle.throttled) == ("210 MHz", ("idle",), False)
    assert parse_state("1 MHz, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]").clock_limits == ()
    assert "nvidia-smi printed" in parse_state("Field is not a valid field").unavailable
    assert not GpuState(unavailable="none").throttled


def test_tiny_model_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "run.py", "task=bench", "task.warmup=0", "task.calls=2", "task.trace=true"),
            *("device=cpu", "logger=plain", "model.steps=1", f"output.dir={tmp_path / 'out'}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {BENCH_FILE, "bench.md", "trace_eager.json.gz", "trace_graph+fused.json.gz"}
    found = report(tmp_path / "out")
    assert found["unequal_outputs"] == []
    assert set(found["arms"]) == {"eager", "graph+fused"}
    assert "eager (no_cuda)" in done.stdout
