"""`task=run`: one request, measured cold and repeated, with its outputs in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from accel.errors import ConfigError, SamebitError, StrictModeError, UnequalBitsError
from accel.record import RunRecord, StageRecord
from pipelines.output_folder import OutputFolder
from pipelines.pipeline import PipelineDescription
from pipelines.progress import NULL_PROGRESS, Progress
from tasks.config import RunConfig, RunTask, config_hash
from tasks.console import RunConsole
from tasks.environment import device_facts, software
from tasks.result_file import RESULT_FILE, RunResult, Status, encode_result


class Result(Protocol):
    """What a pipeline returns. digests: SHA-256 of every stage output, by "stage.field"."""

    @property
    def digests(self) -> Mapping[str, str]: ...


class RunnablePipeline(Protocol):
    """What this task needs of a pipeline; see `pipelines.pipeline.Pipeline`."""

    @property
    def description(self) -> PipelineDescription: ...
    @property
    def record(self) -> RunRecord: ...
    def run(self, request: Any, *, progress: Progress = ...) -> Result: ...
    def profile(self, request: Any) -> None: ...
    def files(self, result: Any, *, config_hash: str) -> dict[str, bytes]: ...
    def strict_violations(self) -> list[str]: ...
    def close(self) -> None: ...


@dataclass
class Measurement:
    """Like requests sent to one pipeline, and whether they gave the same bits.

    request: wall times of whole requests, in ms; per-stage numbers are in `pipeline.record`.
    result: of the first request. unequal: "stage.field" names that differed from it later.
    """

    pipeline: RunnablePipeline
    request: StageRecord = field(default_factory=lambda: StageRecord("request"))
    result: Result | None = None
    unequal: set[str] = field(default_factory=set)

    def run(self, request: Any, *, repeats: int, profile: bool, progress: Progress = NULL_PROGRESS) -> None:
        """One cold request, then `repeats` steady ones, then one under the profiler if asked.

        Can be interrupted at any point; everything measured before stays.
        """
        progress.start("warm-up", 1)
        self._once(request, progress)
        progress.advance("warm-up")
        progress.finish("warm-up")
        progress.start("requests", repeats)
        for _ in range(repeats):
            # Steps are not shown here: drawing would count as theirs.
            self._once(request, NULL_PROGRESS)
            progress.advance("requests")
        progress.finish("requests")
        if profile:
            self.pipeline.profile(request)

    def _once(self, request: Any, progress: Progress) -> None:
        begin = time.perf_counter()
        result = self.pipeline.run(request, progress=progress)
        self.request.add_wall((time.perf_counter() - begin) * 1e3)
        if self.result is None:
            self.result = result
        self.unequal |= {name for name, _ in result.digests.items() ^ self.result.digests.items()}


def main(config: RunConfig, *, folder: Path) -> None:
    """Run, show and write everything of one run.

    folder: claimed before anything is loaded.
    Raises: OutputError, UnequalBitsError, StrictModeError (both after the outputs were
    written), and whatever building or running raises. KeyboardInterrupt after the first
    request writes what was measured so far, then goes on.
    """
    assert isinstance(config.task, RunTask)
    with (
        OutputFolder.claim(folder, result_name=RESULT_FILE) as output,
        RunConsole(config.logger.kind) as console,
    ):
        console.header(config_hash=config_hash(config), accel=config.accel, software=software())
        pipeline, request = load(config, progress=console.progress)
        with contextlib.closing(pipeline):
            device = pipeline.description.device
            console.pipeline(pipeline.description, device_facts(device))
            measurement = Measurement(pipeline)
            try:
                measurement.run(
                    request,
                    repeats=config.task.repeats,
                    profile=_profiles(config.task, device),
                    progress=console.progress,
                )
            except KeyboardInterrupt:
                if measurement.result is not None:
                    console.progress.stop()
                    console.interrupted()
                    _finish(config, measurement, "interrupted", console=console, output=output)
                raise
            status, error = _verdict(config, measurement)
            _finish(config, measurement, status, console=console, output=output)
            if error is not None:
                raise error


def load(config: RunConfig, *, progress: Progress) -> tuple[RunnablePipeline, Any]:
    """The pipeline and the request that the configuration describes."""
    # Models take seconds to import; an unusable folder shows before that.
    from pipelines.build import build

    pipeline = build(config, progress=progress)
    return pipeline, pipeline.request_from(config)


def _profiles(task: RunTask, device: str) -> bool:
    cuda = device.startswith("cuda")
    if task.profile is True and not cuda:
        raise ConfigError(f"task.profile=true needs CUDA, this run uses {device}. Use task.profile=auto.")
    return cuda and task.profile is not False


def _verdict(config: RunConfig, measurement: Measurement) -> tuple[Status, SamebitError | None]:
    if measurement.unequal:
        names = ", ".join(sorted(measurement.unequal))
        return "unequal", UnequalBitsError(
            f"Requests with the same inputs gave different bits in {names}. "
            "Run again with accel=eager to see whether acceleration is the cause."
        )
    violations = measurement.pipeline.strict_violations()
    if config.accel.strict and violations:
        return "not_strict", StrictModeError(
            "accel.strict=true and not everything planned was accelerated: " + "; ".join(violations)
        )
    return "ok", None


def _finish(
    config: RunConfig, measurement: Measurement, status: Status, *, console: RunConsole, output: OutputFolder
) -> None:
    """Show first: a full disk must not take the table along."""
    pipeline = measurement.pipeline
    unequal = sorted(measurement.unequal)
    console.report(pipeline.record, measurement.request, unequal=unequal)
    files = pipeline.files(measurement.result, config_hash=config_hash(config))
    result = _result(config, measurement, status, files)
    output.write({**files, RESULT_FILE: encode_result(result)})
    console.written(output.path, [*files, RESULT_FILE])


def _result(
    config: RunConfig, measurement: Measurement, status: Status, files: Mapping[str, bytes]
) -> RunResult:
    assert measurement.result is not None
    pipeline = measurement.pipeline
    return RunResult(
        status=status,
        pipeline=asdict(pipeline.description),
        config=msgspec.to_builtins(config),
        config_hash=config_hash(config),
        environment={"software": software(), "device": device_facts(pipeline.description.device)},
        requests=1 + len(measurement.request.walls_ms),
        unequal_outputs=sorted(measurement.unequal),
        strict_violations=pipeline.strict_violations(),
        request=measurement.request.to_dict(),
        stages=pipeline.record.to_dict(),
        digests=dict(measurement.result.digests),
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    )
