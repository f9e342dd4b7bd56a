"""`accel=auto` in a task: measure, say what was chosen, and what to keep of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from accel.policy import AccelPolicy
from pipelines.auto_policy import AutoChoice, choose
from pipelines.paired_timing import TimedPipeline
from pipelines.pipeline import PipelineDescription
from pipelines.policy_file import policy_yaml
from tasks.console import RunConsole
from tasks.environment import device_facts, software

P = TypeVar("P", bound=TimedPipeline)

POLICY_FILE = "auto.yaml"


def choice_for(
    pipeline: TimedPipeline, request: Any, policy: AccelPolicy, *, console: RunConsole
) -> AutoChoice | None:
    """What `accel.auto_seconds` makes of the policy, shown; `None` where there is nothing to choose.

    pipeline: lends its components; it is not run itself.
    """
    if policy.auto_seconds is None:
        return None
    choice = choose(pipeline, request, policy, progress=console.progress)
    console.choice(choice)
    return choice


@contextmanager
def as_chosen(
    loaded: P, request: Any, policy: AccelPolicy, *, console: RunConsole
) -> Iterator[tuple[P, AutoChoice | None]]:
    """The pipeline with the policy that `choice_for` finds, closed at the end; or `loaded` itself."""
    choice = choice_for(loaded, request, policy, console=console)
    if choice is None:
        yield loaded, None
        return
    with closing(loaded.with_policy(choice.policy)) as pipeline:
        yield pipeline, choice


def policy_files(choice: AutoChoice | None, description: PipelineDescription) -> dict[str, bytes]:
    """The choice as a file that `accel=PATH` takes; none without a choice."""
    if choice is None:
        return {}
    device = device_facts(description.device)["name"]
    origin = f"{description.model}, {description.size}, on {device} with torch {software()['torch']}"
    return {POLICY_FILE: policy_yaml(choice, origin=origin).encode()}


def choices_in_words(choice: AutoChoice | None) -> dict[str, dict[str, str]]:
    """JSON-ready, by stage: its `choice`, e.g. "full graphs + fused", and the `reason`."""
    stages = choice.stages if choice else {}
    return {
        name: {"choice": str(chosen.candidate), "reason": chosen.reason} for name, chosen in stages.items()
    }
