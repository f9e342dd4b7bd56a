"""`task=bench`: how much faster is the chosen acceleration, on one request, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from accel.errors import OutputError, SamebitError, UnequalBitsError
from accel.measure.stage_calls import around_stages
from accel.measure.trace import chrome_trace, stage_range
from accel.policy import AccelPolicy
from pipelines.auto_policy import AutoChoice
from pipelines.build import choose_device
from pipelines.output_folder import OutputFolder
from pipelines.progress import NULL_PROGRESS, Progress
from tasks.arms import Arm, opened_arms, policy_named, strict_error
from tasks.auto_choice import choices_in_words, policy_files
from tasks.bench_table import FACTS, LATENCIES, TOTAL, BenchReport, Timing, bench_markdown
from tasks.config import RunConfig
from tasks.delayed_signals import delaying_signals
from tasks.differences import breaks_promise, relative_error
from tasks.gpu_state import GpuState, gpu_state
from tasks.manifest_file import manifest_of
from tasks.measurement_settings import BenchTask
from tasks.report_console import ReportConsole, refusal_lines
from tasks.report_file import encode_report, title_of
from tasks.sweep import folder_name
from tasks.timed_arm import TimedArm

BENCH_FILE = "bench.json"
TABLE_FILE = "bench.md"

Status = Literal["ok", "interrupted", "unequal", "not_strict"]


@dataclass
class Bench:
    """Two arms timed in turn. states: of the GPU, before and after the timed requests."""

    reference: TimedArm
    accelerated: TimedArm
    device: torch.device
    states: dict[str, GpuState] = field(default_factory=dict)

    def run(self, request: Any, *, warmup: int, calls: int, progress: Progress = NULL_PROGRESS) -> None:
        """Cold, warm-up, timed A B B A. Can be interrupted at any point; every time measured before stays."""
        progress.start("warm-up", 2 * (1 + warmup))
        for arm in (self.reference, self.accelerated):
            arm.start(request)
            progress.advance("warm-up")
        # Asking takes a while, in which the clocks sink: not between the warm-up and the timed requests.
        self.states["before"] = gpu_state(self.device)
        for arm in self._in_turn(warmup):
            arm.pipeline.run(request)
            progress.advance("warm-up")
        progress.finish("warm-up")
        progress.start("calls", 2 * calls)
        for arm in self._in_turn(calls):
            arm.time(request)
            progress.advance("calls")
        progress.finish("calls")
        self.states["after"] = gpu_state(self.device)
        for arm in (self.reference, self.accelerated):
            arm.finish(request)

    def _in_turn(self, turns: int) -> Iterator[TimedArm]:
        """A B B A: what drifts with time, like clocks, drifts for both."""
        arms = self.reference, self.accelerated
        for turn in range(turns):
            yield from arms if turn % 2 == 0 else reversed(arms)

    @property
    def report(self) -> BenchReport:
        arms = {arm.name: _timings(arm) for arm in (self.reference, self.accelerated)}
        return BenchReport(arms=arms, unequal=self.unequal, errors=self.errors, states=self.states)

    @property
    def unequal(self) -> list[str] | None:
        """Outputs, by "stage.field" and in pipeline order, that differ from the reference's first.

        `None`: there is nothing to compare.
        """
        if not self.accelerated.digests:
            return None
        expected, *others = *self.reference.digests, *self.accelerated.digests
        return [
            name for name, digest in expected.items() if any(other.get(name) != digest for other in others)
        ]

    @property
    def errors(self) -> dict[str, float | None]:
        """How far the outputs in `unequal` are from the reference's in the last request of each arm."""
        ran = self.reference.outputs.keys() & self.accelerated.outputs.keys()
        return {
            name: relative_error(self.reference.outputs[name], self.accelerated.outputs[name])
            for name in self.unequal or ()
            if name in ran
        }

    @property
    def breaks_promise(self) -> bool:
        """Whether outputs differ although the tier of the first one's stage promises equal bits."""
        if not self.unequal:
            return False
        stage = self.unequal[0].partition(".")[0]
        return all(breaks_promise(stage, arm.pipeline.record) for arm in (self.reference, self.accelerated))


def _timings(arm: TimedArm) -> list[Timing]:
    """Stages in order, then the whole request."""
    stages = [
        Timing(name=name, cold_ms=stage.cold_ms, walls_ms=arm.stage_walls_ms[name], record=stage)
        for name, stage in arm.pipeline.record.stages.items()
    ]
    return [*stages, Timing(name=TOTAL, cold_ms=arm.cold_ms, walls_ms=arm.walls_ms)]


def main(config: RunConfig, *, folder: Path) -> None:
    """Time, show and write bench.json, bench.md and, if asked, a trace of each arm.

    folder: claimed before anything is loaded.
    Raises: OutputError; UnequalBitsError, StrictModeError after everything was written; and
    whatever building or running raises. KeyboardInterrupt and Terminated after the first request write what
    was measured so far, then go on.
    """
    task = config.task
    assert isinstance(task, BenchTask)
    with (
        OutputFolder.claim(folder, result_name=BENCH_FILE) as output,
        ReportConsole(config.logger.kind) as console,
    ):
        against = policy_named(task.against)
        names = arm_names(against, config.accel)
        manifest = manifest_of(config)
        console.begin(config)
        with opened_arms(config, against, console=console) as (arm, subject):
            if manifest is not None:
                manifest.capture(subject.pipeline, config.model)
            reference = TimedArm(names[0], arm)
            accelerated = TimedArm(names[1], subject.pipeline)
            bench, request = Bench(reference, accelerated, choose_device(config.device)), subject.request
            finish = partial(_finish, config, bench, subject.choice, console=console, output=output)
            with console.interruptible(
                has_results=lambda: reference.cold_ms is not None, write=lambda: finish("interrupted")
            ):
                bench.run(request, warmup=task.warmup, calls=task.calls, progress=console.progress)
                traces, untraced = _traces(bench, request) if task.trace else ({}, None)
            status, error = _status(config, bench)
            finish(status, traces)
            if (failure := error or untraced) is not None:
                raise failure


def arm_names(reference: AccelPolicy, accelerated: AccelPolicy) -> tuple[str, str]:
    """Names of their own, for policies that differ."""
    same = reference.name == accelerated.name
    return reference.name, f"{accelerated.name} (changed)" if same else accelerated.name


def _status(config: RunConfig, bench: Bench) -> tuple[Status, SamebitError | None]:
    if bench.unequal and bench.breaks_promise:
        return "unequal", UnequalBitsError(
            f"The arms gave different bits in {', '.join(bench.unequal)}. Run task=verify to find out why."
        )
    not_strict = strict_error(config, bench.accelerated.pipeline)
    return ("not_strict" if not_strict else "ok"), not_strict


@delaying_signals()
def _finish(
    config: RunConfig,
    bench: Bench,
    choice: AutoChoice | None,
    status: Status,
    traces: Mapping[str, bytes] | None = None,
    *,
    console: ReportConsole,
    output: OutputFolder,
) -> None:
    """Show first: a full disk must not take the table along."""
    report = bench.report
    console.progress.stop()
    console.say()
    console.table(LATENCIES, report.latency_rows(), text_columns=2)
    console.say()
    console.table(FACTS, report.fact_rows(), text_columns=2)
    console.say()
    for note in report.notes():
        console.say(note)
    console.section("Not accelerated", refusal_lines(bench.accelerated.pipeline.record))
    console.say()
    findings = {
        "status": status,
        "against": bench.reference.name,
        "choices": choices_in_words(choice),
        "unequal_outputs": bench.unequal,
        "relative_errors": dict(report.errors),
        "gpu": {when: asdict(state) for when, state in bench.states.items()},
        "speed_up": report.speed_ups,
        "arms": {arm: [timing.to_dict() for timing in timings] for arm, timings in report.arms.items()},
        "histogram": asdict(report.histogram),
        "strict_violations": bench.accelerated.pipeline.strict_violations(),
    }
    description = bench.accelerated.pipeline.description
    title = title_of(description)
    files = {
        **(traces or {}),
        **policy_files(choice, description),
        TABLE_FILE: bench_markdown(report, title=title).encode(),
        BENCH_FILE: encode_report(config, description, findings),
    }
    output.write(files)
    console.written(output.path, list(files))


def _traces(bench: Bench, request: Any) -> tuple[dict[str, bytes], OutputError | None]:
    """One of each arm, or why there is none: a full disk must not take the measurement along."""
    arms = bench.reference, bench.accelerated
    try:
        return {
            f"trace_{folder_name(arm.name)}.json.gz": _trace(arm.pipeline, request, bench.device)
            for arm in arms
        }, None
    except OSError as error:
        return {}, OutputError(
            f"No trace could be made: {error.strerror or error}. Free some space for temporary files."
        )


def _trace(pipeline: Arm, request: Any, device: torch.device) -> bytes:
    with around_stages(pipeline.stages, stage_range):
        return chrome_trace(lambda: pipeline.run(request), device=device)
