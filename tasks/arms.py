"""The pipelines that a task compares: one per policy, all on the same loaded components."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from accel.errors import StrictModeError
from accel.policy import AccelPolicy
from pipelines.auto_policy import AutoChoice
from pipelines.build import build
from pipelines.pipeline import Pipeline
from tasks.auto_choice import choice_for
from tasks.config import RunConfig, compose
from tasks.report_console import ReportConsole

Arm: TypeAlias = Pipeline[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Accelerated:
    """The pipeline that runs as `accel` says.

    policy: its own, with nothing left to choose. request: that of the configuration. choice: how
    `accel=auto` came to that policy; `None` for all others.
    """

    pipeline: Arm
    policy: AccelPolicy
    request: Any
    choice: AutoChoice | None


def policy_named(name: str, *overrides: str) -> AccelPolicy:
    """What `accel=NAME` means, by itself or with further settings. Raises: ConfigError."""
    return compose(f"accel={name}", *overrides).accel


@contextmanager
def opened_arms(
    config: RunConfig, reference: AccelPolicy, *, console: ReportConsole
) -> Iterator[tuple[Arm, Accelerated]]:
    """A pipeline with the reference's policy and one with that of the configuration, closed at the end.

    The model is loaded once. With `accel=auto`, the policy is chosen before anything else runs.
    Raises: as `pipelines.build.build` and `Pipeline.request_from`.
    """
    with closing(build(replace(config, accel=reference), progress=console.progress)) as arm:
        console.built(arm.description)
        request = arm.request_from(config)
        choice = choice_for(arm, request, config.accel, console=console)
        policy = choice.policy if choice else config.accel
        with closing(arm.with_policy(policy)) as pipeline:
            yield arm, Accelerated(pipeline=pipeline, policy=policy, request=request, choice=choice)


def strict_error(config: RunConfig, arm: Arm) -> StrictModeError | None:
    """With `accel.strict`, the error that what ran eager in this arm amounts to."""
    violations = arm.strict_violations() if config.accel.strict else []
    return StrictModeError.listing(violations) if violations else None
