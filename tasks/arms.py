"""The pipelines that a task compares: one per policy, all on the same loaded components."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from accel.errors import StrictModeError
from accel.policy import AccelPolicy
from pipelines.build import build
from pipelines.pipeline import Pipeline
from pipelines.progress import Progress
from tasks.config import RunConfig, compose
from tasks.manifest_file import ManifestFile

Arm: TypeAlias = Pipeline[Any, Any]


def policy_named(name: str) -> AccelPolicy:
    """What `accel=NAME` means without further settings. Raises: ConfigError."""
    return compose(f"accel={name}").accel


@contextmanager
def opened_arms(
    config: RunConfig, policies: Sequence[AccelPolicy], *, progress: Progress
) -> Iterator[list[Arm]]:
    """One pipeline for each policy, in order, closed at the end; the model is loaded once.

    config: says what is built, but for its policy. Raises: as `pipelines.build.build`.
    """
    first, *others = policies
    with ExitStack() as stack:
        arms = [stack.enter_context(closing(build(replace(config, accel=first), progress=progress)))]
        for policy in others:
            arms.append(stack.enter_context(closing(arms[0].with_policy(policy))))
        yield arms


def manifest_of(config: RunConfig) -> ManifestFile | None:
    """The file of `accel.manifest`, read; these tasks capture what it lists and leave it as it is.

    Raises: ConfigError for a damaged one.
    """
    return None if config.accel.manifest is None else ManifestFile(Path(config.accel.manifest))


def strict_error(config: RunConfig, arm: Arm) -> StrictModeError | None:
    """With `accel.strict`, the error that what ran eager in this arm amounts to."""
    violations = arm.strict_violations() if config.accel.strict else []
    if not violations:
        return None
    return StrictModeError(
        "accel.strict=true and not everything planned was accelerated:\n  " + "\n  ".join(violations)
    )
