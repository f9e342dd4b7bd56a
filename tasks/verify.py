"""`task=verify`: prove, on many requests, that acceleration changes no bit; or find what does."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

from accel.errors import SamebitError, UnequalBitsError
from accel.record import Kind, RunRecord
from pipelines.auto_policy import AutoChoice
from pipelines.output_folder import OutputFolder
from tasks.arms import opened_arms, policy_named, strict_error
from tasks.auto_choice import choices_in_words, policy_files
from tasks.bit_comparison import Comparison
from tasks.config import RunConfig, config_hash
from tasks.delayed_signals import delaying_signals
from tasks.manifest_file import manifest_of
from tasks.measurement_settings import VerifyTask
from tasks.report_console import ReportConsole, refusal_lines
from tasks.report_file import encode_report
from tasks.request_facts import describe_request
from tasks.varied_requests import varied_requests

VERIFY_FILE = "verify.json"

Status = Literal["ok", "interrupted", "unequal", "not_strict"]


def main(config: RunConfig, *, folder: Path) -> None:
    """Compare, show and write verify.json.

    folder: claimed before anything is loaded.
    Raises: OutputError; UnequalBitsError, StrictModeError after everything was written; and whatever
        building or running raises. KeyboardInterrupt and Terminated after the first comparison write what
        was compared so far, then go on.
    """
    task = config.task
    assert isinstance(task, VerifyTask)
    with (
        OutputFolder.claim(folder, result_name=VERIFY_FILE) as output,
        ReportConsole(config.logger.kind) as console,
    ):
        manifest = manifest_of(config)
        console.begin(config)
        with opened_arms(config, policy_named("eager"), console=console) as (eager, subject):
            requests = varied_requests(config, eager, task.requests)
            if manifest is not None:
                manifest.capture(subject.pipeline, config.model)
            comparison = Comparison(eager, subject.pipeline, requests, config_hash(config))
            finish = partial(_finish, config, comparison, subject.choice, console=console, output=output)
            with console.interruptible(
                has_results=lambda: bool(comparison.visits), write=lambda: finish("interrupted")
            ):
                comparison.run(progress=console.progress)
                comparison.find_culprits(subject.policy, progress=console.progress)
            status, error = _status(config, comparison)
            finish(status)
            if error is not None:
                raise error


def was_accelerated(record: RunRecord) -> bool:
    """Whether anything was replayed, fused or compiled."""
    return any(
        any(outcome.kind is not Kind.EAGER for outcome in stage.outcomes)
        or any(outcome.fused for outcome in stage.sites)
        for stage in record.stages.values()
    )


def _status(config: RunConfig, comparison: Comparison) -> tuple[Status, SamebitError | None]:
    if comparison.eager_unequal:
        names = ", ".join(sorted(comparison.eager_unequal))
        return "unequal", UnequalBitsError(
            f"accel=eager gives different bits for the same request in {names}: an operation of PyTorch is "
            "not deterministic on this device, so acceleration can't be judged."
        )
    if comparison.broken is not None:
        _, difference = comparison.broken
        return "unequal", UnequalBitsError(
            f"Acceleration changes bits: {difference}. Please report it with {VERIFY_FILE}; until then "
            "switch off what it blames, or use accel=eager."
        )
    not_strict = strict_error(config, comparison.accelerated)
    return ("not_strict" if not_strict else "ok"), not_strict


@delaying_signals()
def _finish(
    config: RunConfig,
    comparison: Comparison,
    choice: AutoChoice | None,
    status: Status,
    *,
    console: ReportConsole,
    output: OutputFolder,
) -> None:
    """Show first: a full disk must not take the verdict along."""
    _show(comparison, console)
    record = comparison.accelerated.record
    unequal = bool(comparison.differences or comparison.eager_unequal)
    findings = {
        "status": status,
        "verdict": "unequal" if unequal else "equal",
        "tier": config.accel.tier,
        "choices": choices_in_words(choice),
        "accelerated": was_accelerated(record),
        "requests": [describe_request(request) for request in comparison.requests],
        "comparisons": [asdict(visit) for visit in comparison.visits],
        "eager_unequal": sorted(comparison.eager_unequal),
        "blame": comparison.blame and asdict(comparison.blame),
        "strict_violations": comparison.accelerated.strict_violations(),
        "stages": record.to_dict(),
    }
    description = comparison.accelerated.description
    files = {
        **policy_files(choice, description),
        VERIFY_FILE: encode_report(config, description, findings),
    }
    output.write(files)
    console.written(output.path, list(files))


def _show(comparison: Comparison, console: ReportConsole) -> None:
    console.progress.stop()
    console.section("Compared", _compared(comparison))
    console.section("Not accelerated", refusal_lines(comparison.accelerated.record))
    console.section("Eager differs from itself in", sorted(comparison.eager_unequal))
    for number, difference in comparison.differences[:1]:
        console.section("First difference", [f"request {comparison.visits[number].request}: {difference}"])
    if comparison.blame is not None:
        console.section("Blame", [str(comparison.blame)])
    console.say()
    console.say(*_verdict(comparison))


def _verdict(comparison: Comparison) -> tuple[str, str]:
    """The last line, and its style."""
    differing = f"{len(comparison.differences)} of {len(comparison.visits)} comparisons differ"
    if comparison.eager_unequal:
        return "UNDECIDED: eager gives different bits for the same request.", "bold red"
    if comparison.broken:
        return f"UNEQUAL: {differing}.", "bold red"
    if comparison.differences:
        return f"{differing}, as the tiers of these stages allow; nothing else does.", "yellow"
    if not was_accelerated(comparison.accelerated.record):
        return "EQUAL, but nothing was accelerated: this proves nothing about acceleration.", "yellow"
    return "EQUAL: accelerated results have the bits of eager ones.", "green"


def _compared(comparison: Comparison) -> list[str]:
    """One line a request: how often it was compared, in how many outputs, and what came out."""
    lines = []
    for number, request in enumerate(comparison.requests):
        visits = [visit for visit in comparison.visits if visit.request == number]
        if not visits:
            continue
        facts = ", ".join(f"{name} {value}" for name, value in describe_request(request).items())
        differing = sum(visit.difference is not None for visit in visits)
        verdict = f"{differing} UNEQUAL" if differing else "equal"
        lines.append(f"request {number} x{len(visits)}, {visits[0].outputs} outputs: {verdict}  ({facts})")
    return lines
