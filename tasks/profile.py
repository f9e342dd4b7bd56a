"""`task=profile`: where the time of a request goes, stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from accel.measure.activity import Activity, observe
from accel.measure.stage_calls import around_stages
from accel.measure.timing import median
from accel.measure.traffic import copy_bandwidth, counted_traffic, fused_kernel_names
from accel.policy import AccelPolicy
from pipelines.auto_policy import AutoChoice
from pipelines.build import choose_device
from pipelines.output_folder import OutputFolder
from pipelines.progress import NULL_PROGRESS, Progress
from tasks.arms import opened_arms, policy_named, strict_error
from tasks.auto_choice import choices_in_words, policy_files
from tasks.config import RunConfig
from tasks.delayed_signals import delaying_signals
from tasks.manifest_file import manifest_of
from tasks.measurement_settings import ProfileTask
from tasks.profile_table import profile_markdown, sections
from tasks.report_console import ReportConsole, refusal_lines
from tasks.report_file import encode_report, title_of
from tasks.stage_profile import FusedTraffic, StageProfile
from tasks.timed_arm import TimedArm

PROFILE_FILE = "profile.json"
TABLE_FILE = "profile.md"

Status = Literal["ok", "interrupted", "not_strict"]


@dataclass
class Profiling:
    """One pipeline, timed without and then run once with a profiler.

    activities: by stage, as far as profiling got. moved: bytes that fused kernels must read and write, by
    stage and site. bandwidth: of a copy on the device, bytes per second; `None` where it was not measured.
    """

    timed: TimedArm
    device: torch.device
    activities: dict[str, Activity] = field(default_factory=dict)
    moved: dict[str, dict[str, int]] = field(default_factory=dict)
    bandwidth: float | None = None

    def run(self, request: Any, *, warmup: int, calls: int, progress: Progress = NULL_PROGRESS) -> None:
        """Can be interrupted at any point; what was measured before stays."""
        pipeline = self.timed.pipeline
        progress.start("requests", 1 + warmup + calls)
        self.timed.start(request)
        for number in range(warmup + calls):
            progress.advance("requests")
            if number < warmup:
                pipeline.run(request)
            else:
                self.timed.time(request)
        progress.finish("requests")
        with around_stages(pipeline.stages, self._observe):
            pipeline.run(request)
        if self.device.type == "cuda":
            self.bandwidth = copy_bandwidth(self.device)

    def count_traffic(self, request: Any, policy: AccelPolicy) -> None:
        """Run once without graphs, whose replays call no site; nothing to do where nothing was fused."""
        stages = self.timed.pipeline.record.stages.values()
        if not any(outcome.fused for stage in stages for outcome in stage.sites):
            return
        pipeline = self.timed.pipeline.with_policy(graphless(policy))
        with closing(pipeline), around_stages(pipeline.stages, self._count):
            pipeline.run(request)

    @property
    def stages(self) -> list[StageProfile]:
        """The stages that were profiled, in order."""
        ours = fused_kernel_names()
        found = []
        for name, activity in self.activities.items():
            stage = StageProfile(
                name=name,
                p50_ms=median(self.timed.stage_walls_ms[name]),
                activity=activity,
                on_gpu=self.device.type == "cuda",
                ours=ours,
            )
            moved = self.moved.get(name)
            if moved and self.bandwidth is not None:
                traffic = FusedTraffic(
                    moved=moved, ms=stage.by_category.get("ours", 0.0), copy_bandwidth=self.bandwidth
                )
                stage = replace(stage, traffic=traffic)
            found.append(stage)
        return found

    def _observe(self, stage: str, call: Callable[[], None]) -> None:
        self.activities[stage] = observe(call, device=self.device)

    def _count(self, stage: str, call: Callable[[], None]) -> None:
        with counted_traffic() as moved:
            call()
        self.moved[stage] = dict(moved)


def main(config: RunConfig, *, folder: Path) -> None:
    """Profile, show and write profile.json and profile.md.

    folder: claimed before anything is loaded.
    Raises: OutputError; StrictModeError after everything was written; and whatever building or running
    raises. KeyboardInterrupt and Terminated after the first request write what was measured so far, then go
    on.
    """
    task = config.task
    assert isinstance(task, ProfileTask)
    with (
        OutputFolder.claim(folder, result_name=PROFILE_FILE) as output,
        ReportConsole(config.logger.kind) as console,
    ):
        manifest = manifest_of(config)
        console.begin(config)
        with opened_arms(config, policy_named("eager"), console=console) as (_, subject):
            if manifest is not None:
                manifest.capture(subject.pipeline, config.model)
            timed = TimedArm(config.accel.name, subject.pipeline)
            profiling = Profiling(timed, choose_device(config.device))
            finish = partial(_finish, config, profiling, subject.choice, console=console, output=output)
            with console.interruptible(
                has_results=lambda: timed.cold_ms is not None, write=lambda: finish("interrupted")
            ):
                profiling.run(
                    subject.request, warmup=task.warmup, calls=task.calls, progress=console.progress
                )
                profiling.count_traffic(subject.request, subject.policy)
            error = strict_error(config, subject.pipeline)
            finish("not_strict" if error else "ok")
            if error is not None:
                raise error


def graphless(policy: AccelPolicy) -> AccelPolicy:
    """The same fused kernels without graphs."""
    stages = {name: replace(own, enable_cuda_graph=False) for name, own in policy.stages.items()}
    return replace(policy, enable_cuda_graph=False, stages=stages)


@delaying_signals()
def _finish(
    config: RunConfig,
    profiling: Profiling,
    choice: AutoChoice | None,
    status: Status,
    *,
    console: ReportConsole,
    output: OutputFolder,
) -> None:
    """Show first: a full disk must not take the tables along."""
    assert isinstance(config.task, ProfileTask)
    pipeline, stages = profiling.timed.pipeline, profiling.stages
    notes, found = _notes(profiling), sections(stages, top=config.task.top)
    console.progress.stop()
    console.say()
    for note in notes:
        console.say(note)
    for section in found:
        console.say()
        console.say(section.title, style="bold")
        console.table(section.columns, section.rows, text_columns=section.text_columns)
    console.section("Not accelerated", refusal_lines(pipeline.record))
    console.say()
    findings = {
        "status": status,
        "accel": config.accel.name,
        "choices": choices_in_words(choice),
        "cold_ms": profiling.timed.cold_ms,
        "walls_ms": profiling.timed.walls_ms,
        "copy_bandwidth": profiling.bandwidth,
        "stages": [stage.to_dict() for stage in stages],
        "record": [
            row | {"walls_ms": profiling.timed.stage_walls_ms[row["name"]]}  # without the profiled request
            for row in pipeline.record.to_dict()
        ],
        "strict_violations": pipeline.strict_violations(),
    }
    description = pipeline.description
    title = f"{title_of(description)}, {config.accel.name}"
    files = {
        **policy_files(choice, description),
        TABLE_FILE: profile_markdown(found, title=title, notes=notes).encode(),
        PROFILE_FILE: encode_report(config, description, findings),
    }
    output.write(files)
    console.written(output.path, list(files))


def _notes(profiling: Profiling) -> list[str]:
    if profiling.device.type != "cuda":
        return ["CPU: operators by their own time under the profiler; nothing here is about a GPU."]
    lines = [
        "GPU: kernels of one profiled request. Idle: p50 of the stage without a profiler less its busy time."
    ]
    if profiling.bandwidth is not None:
        lines.append(f"A copy on this device moves {profiling.bandwidth / 1e9:.0f} GB/s, read and written.")
    return lines
