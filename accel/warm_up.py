"""Captures the signatures of earlier runs before the first request, and tells which ones this run used.

Source: graph spec section 10.
"""

from __future__ import annotations

import datetime
import inspect
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch

from accel.graphs.containment import describe as in_words
from accel.graphs.example_arguments import UnknownFormError, annotated_dataclasses, describe, example
from accel.graphs.manifest import Manifest, UsedSignature
from accel.policy import AccelPolicy
from accel.runner import BoundRegion, Runner

_log = logging.getLogger("samebit")


class _NoGraphError(Exception):
    """A signature of the manifest could not be captured."""


def capture_manifest(
    manifest: Manifest, runner: Runner, policy: AccelPolicy, *, device: torch.device
) -> set[str]:
    """Capture the signatures listed for the runner's regions, those with the largest graphs first.

    Each stage then has all of its graphs or none: if one can't be captured, those before it are freed, and
    requests capture their own. What is refused or skipped is logged. Starts a fresh record. Call it before
    the first request.
    Returns `UsedSignature.identity` of those captured, which no request has used yet.
    """
    unused: set[str] = set()
    regions = {(region.stage, region.name): region for region in runner.regions}
    for stage in dict.fromkeys(used.stage for used in manifest.signatures):
        wanted = sorted(_wanted(manifest, stage, policy), key=lambda used: -used.bytes)
        try:
            captured = {used.identity for used in wanted if _capture(used, regions, runner, device)}
            unused |= captured
            _log.info("%s: %d graphs captured from the manifest", stage, len(captured))
        except _NoGraphError as error:
            _log.warning("%s: no graphs from the manifest: %s", stage, error)
            for region in runner.regions:
                if region.stage == stage:
                    region.graph.reset()
    runner.new_record()
    return unused


def _wanted(manifest: Manifest, stage: str, policy: AccelPolicy) -> Iterator[UsedSignature]:
    """As many of each region as may live at once; the manifest lists what was used last first."""
    room = Counter[str]()
    for used in manifest.signatures:
        if used.stage == stage and room[used.region] < policy.for_stage(stage).max_entries:
            room[used.region] += 1
            yield used


def _capture(
    used: UsedSignature,
    regions: Mapping[tuple[str, str], BoundRegion],
    runner: Runner,
    device: torch.device,
) -> bool:
    """Whether there is a graph for it now; False for a signature that means nothing here.

    Raises: _NoGraphError.
    """
    name = f"{used.stage}.{used.region}"
    region = regions.get((used.stage, used.region))
    if region is None:
        _log.warning("%s: skipped in the manifest: no such region with graphs", name)
        return False
    try:
        call = _example_call(used, region, device)
    except UnknownFormError as error:
        _log.warning("%s: skipped in the manifest: %s", name, error)
        return False
    except RuntimeError as error:  # out of memory
        raise _NoGraphError(f"{name}: {in_words(error)}") from None
    runner.new_record()
    record = runner.record.stage(used.stage)
    try:
        region.call(*call.args, **call.kwargs)
    except Exception as error:
        raise _NoGraphError(f"{name}: {in_words(error)}") from None
    for outcome in record.outcomes:
        if outcome.reason is not None:
            raise _NoGraphError(f"{name}: {outcome}: {outcome.detail}")
    return True


def _example_call(used: UsedSignature, region: BoundRegion, device: torch.device) -> inspect.BoundArguments:
    parameters = inspect.signature(region.call)
    if parameters.parameters.keys() != used.arguments.keys():
        raise UnknownFormError(f"takes {list(parameters.parameters)}, not {list(used.arguments)}")
    classes = annotated_dataclasses(region.call)
    arguments = example(used.tensors, used.arguments, classes, device=device)
    return inspect.BoundArguments(parameters, arguments)


def used_signatures(runner: Runner, *, precaptured: Collection[str]) -> list[UsedSignature]:
    """What the runner's live graphs served.

    precaptured: what `capture_manifest` returned; that one call of each does not count.
    A signature that has no form in a manifest is left out, which is logged.
    """
    served = []
    for region in runner.regions:
        for used in _live(region):
            count = used.count - (used.identity in precaptured)
            if count > 0:
                served.append(replace(used, count=count))
    return served


def _live(region: BoundRegion) -> Iterator[UsedSignature]:
    classes = annotated_dataclasses(region.call)
    for stats in region.graph.stats().entries:
        try:
            tensors, arguments = describe(stats.arguments, classes)
        except UnknownFormError as error:
            _log.info("%s.%s: left out of the manifest: %s", region.stage, region.name, error)
            continue
        yield UsedSignature(
            stage=region.stage,
            region=region.name,
            tensors=tensors,
            arguments=arguments,
            count=stats.replays,
            last_used=datetime.date.fromtimestamp(stats.last_used),
            bytes=stats.nbytes,
            ms_eager=stats.eager_ms,
            ms_graph=stats.replay_ms,
        )
