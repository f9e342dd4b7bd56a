"""`task=run`: one request, measured cold and repeated, with its outputs in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from accel.errors import ConfigError, SamebitError, StrictModeError, UnequalBitsError
from accel.graphs.manifest import Manifest, UsedSignature
from accel.policy import AccelPolicy
from accel.record import StageRecord
from pipelines.auto_policy import AutoChoice
from pipelines.build import build, choose_device
from pipelines.output_folder import OutputFolder
from pipelines.paired_timing import TimedPipeline
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.termination import Terminated
from tasks.auto_choice import as_chosen, choices_in_words, policy_files
from tasks.config import RunConfig, RunTask, config_hash
from tasks.console import RunConsole
from tasks.delayed_signals import delaying_signals
from tasks.environment import device_facts, software
from tasks.manifest_file import ManifestFile, manifest_of
from tasks.request_facts import request_in_full
from tasks.result_file import RESULT_FILE, RunResult, Status, Verdict, encode_result


class Result(Protocol):
    """What a pipeline returns.

    digests: SHA-256 of every stage output, by "stage.field". notes: what the user should know of it.
    """

    @property
    def digests(self) -> Mapping[str, str]: ...
    @property
    def notes(self) -> Sequence[str]: ...


class RunnablePipeline(TimedPipeline, Protocol):
    """What this task needs of a pipeline; see `pipelines.pipeline.Pipeline`."""

    def with_policy(self, policy: AccelPolicy) -> Self: ...
    def warm_up(self, requests: Sequence[Any], *, progress: Progress = ...) -> Sequence[Result]: ...
    def run(self, request: Any, *, progress: Progress = ...) -> Result: ...
    def capture_manifest(self, manifest: Manifest) -> None: ...
    def used_signatures(self) -> Sequence[UsedSignature]: ...
    def files(self, result: Any, *, config_hash: str) -> dict[str, bytes]: ...
    def strict_violations(self) -> list[str]: ...
    def not_worth_it(self) -> Mapping[str, Sequence[str]]: ...


@dataclass
class Measurement:
    """Like requests sent to one pipeline, and whether they gave the same bits.

    request: wall times of whole requests, in ms; per-stage numbers are in `pipeline.record`.
    asked: the request. result: of the first one. unequal: "stage.field" names that differed from it later.
    """

    pipeline: RunnablePipeline
    asked: Any
    request: StageRecord = field(default_factory=lambda: StageRecord("request"))
    result: Result | None = None
    unequal: set[str] = field(default_factory=set)

    def run(self, *, repeats: int, profile: bool, progress: Progress = NULL_PROGRESS) -> None:
        """One cold request, the warm-up; then `repeats` steady ones, then one under the profiler if asked.

        Can be interrupted at any point; everything measured before stays.
        """
        self._timed(lambda: self.pipeline.warm_up([self.asked], progress=progress)[0])
        progress.start("requests", repeats)
        for _ in range(repeats):
            # Steps are not shown here: drawing would count as theirs.
            self._timed(lambda: self.pipeline.run(self.asked))
            progress.advance("requests")
        progress.finish("requests")
        if profile:
            self.pipeline.profile(self.asked)

    @property
    def verdict(self) -> Verdict:
        if not self.request.walls_ms:
            return "not compared"
        return "unequal" if self.unequal else "equal"

    def _timed(self, serve: Callable[[], Result]) -> None:
        begin = time.perf_counter()
        result = serve()
        self.request.add_wall((time.perf_counter() - begin) * 1e3)
        if self.result is None:
            self.result = result
        self.unequal |= {name for name, _ in result.digests.items() ^ self.result.digests.items()}


def main(config: RunConfig, *, folder: Path) -> None:
    """Run, show and write everything of one run.

    folder: claimed before anything is loaded; what is cheap to check is checked then.
    Raises: OutputError, UnequalBitsError, StrictModeError (both after the outputs were
    written), and whatever building or running raises. KeyboardInterrupt and Terminated after the
    first request write what was measured so far, then goes on.
    """
    assert isinstance(config.task, RunTask)
    with (
        OutputFolder.claim(folder, result_name=RESULT_FILE) as output,
        RunConsole(config.logger.kind) as console,
    ):
        profile = _profiles(config.task, choose_device(config.device).type)
        manifest = manifest_of(config)
        console.begin(config)
        with _opened(config, console) as (pipeline, request, choice):
            if manifest is not None:
                manifest.capture(pipeline, config.model)
            measurement = Measurement(pipeline, request)
            finish = partial(
                _finish, config, measurement, console=console, output=output, manifest=manifest, choice=choice
            )
            try:
                measurement.run(repeats=config.task.repeats, profile=profile, progress=console.progress)
            except (KeyboardInterrupt, Terminated):
                if measurement.result is not None:
                    console.progress.stop()
                    console.interrupted()
                    finish("interrupted")
                raise
            status, error = _status(config, measurement)
            finish(status)
            if error is not None:
                raise error


def load(config: RunConfig, *, progress: Progress) -> tuple[RunnablePipeline, Any]:
    """The pipeline and the request that the configuration describes; no pipeline stays open without one."""
    pipeline = build(config, progress=progress)
    try:
        return pipeline, pipeline.request_from(config)
    except BaseException:
        pipeline.close()
        raise


@contextlib.contextmanager
def _opened(
    config: RunConfig, console: RunConsole
) -> Iterator[tuple[RunnablePipeline, Any, AutoChoice | None]]:
    """The pipeline, its request, and what `accel=auto` chose for it; closed at the end."""
    loaded, request = load(config, progress=console.progress)
    with contextlib.closing(loaded):
        console.built(loaded.description)
        with as_chosen(loaded, request, config.accel, console=console) as (pipeline, choice):
            yield pipeline, request, choice


def _profiles(task: RunTask, device: str) -> bool:
    cuda = device == "cuda"
    if task.profile is True and not cuda:
        raise ConfigError(f"task.profile=true needs CUDA, this run uses {device}. Use task.profile=auto.")
    return cuda and task.profile is not False


def _status(config: RunConfig, measurement: Measurement) -> tuple[Status, SamebitError | None]:
    if measurement.unequal:
        names = ", ".join(sorted(measurement.unequal))
        return "unequal", UnequalBitsError(
            f"Requests with the same inputs gave different bits in {names}. If accel=eager does so too, an "
            "operation of PyTorch is not deterministic on this device; if not, acceleration is at fault: "
            "please report it with result.json."
        )
    violations = measurement.pipeline.strict_violations()
    if config.accel.strict and violations:
        return "not_strict", StrictModeError.listing(violations)
    return "ok", None


@delaying_signals()
def _finish(
    config: RunConfig,
    measurement: Measurement,
    status: Status,
    *,
    console: RunConsole,
    output: OutputFolder,
    manifest: ManifestFile | None,
    choice: AutoChoice | None,
) -> None:
    """Show first: a full disk must not take the table along."""
    assert measurement.result is not None
    pipeline = measurement.pipeline
    unequal = sorted(measurement.unequal)
    little = [line for lines in pipeline.not_worth_it().values() for line in lines]
    console.report(pipeline.record, measurement.request, unequal=unequal, not_worth_it=little)
    console.notes(measurement.result.notes)
    files = pipeline.files(measurement.result, config_hash=config_hash(config))
    files |= policy_files(choice, pipeline.description)
    result = _result(config, measurement, status, files, choice)
    output.write({**files, RESULT_FILE: encode_result(result)})
    console.written(output.path, [*files, RESULT_FILE])
    if manifest is not None:
        manifest.save(pipeline)


def _result(
    config: RunConfig,
    measurement: Measurement,
    status: Status,
    files: Mapping[str, bytes],
    choice: AutoChoice | None,
) -> RunResult:
    assert measurement.result is not None
    pipeline = measurement.pipeline
    little = pipeline.not_worth_it()
    return RunResult(
        status=status,
        verdict=measurement.verdict,
        pipeline=asdict(pipeline.description),
        config=msgspec.to_builtins(config),
        config_hash=config_hash(config),
        asked=request_in_full(measurement.asked),
        environment={"software": software(), "device": device_facts(pipeline.description.device)},
        requests=1 + len(measurement.request.walls_ms),
        unequal_outputs=sorted(measurement.unequal),
        strict_violations=pipeline.strict_violations(),
        request=measurement.request.to_dict(),
        stages=[row | {"not_worth_it": little.get(row["name"], [])} for row in pipeline.record.to_dict()],
        choices=choices_in_words(choice),
        notes=list(measurement.result.notes),
        digests=dict(measurement.result.digests),
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    )
