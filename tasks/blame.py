"""Which part of the acceleration changes bits: switch parts off one at a time and run the requests again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from accel.policy import AccelPolicy, StageOverride
from accel.record import Kind, StageRecord
from pipelines.progress import Progress
from tasks.arms import Arm
from tasks.differences import first_difference

Rounds = Sequence[Sequence[Any]]
"""Requests in order; captions and tables are computed anew at the start of each round."""


@dataclass(frozen=True)
class Blame:
    """What became equal when it was switched off.

    reproduced: whether the same policy differed again, from a fresh start.
    tried: everything that was switched off, alone. culprits: those of them that mended the result.
    ended_by: the error that cut the search short; empty if none did.
    """

    reproduced: bool
    tried: tuple[str, ...]
    culprits: tuple[str, ...]
    ended_by: str = ""

    def __str__(self) -> str:
        return f"{self._found}; the search ended early: {self.ended_by}" if self.ended_by else self._found

    @property
    def _found(self) -> str:
        if not self.reproduced and self.ended_by:
            return "nobody"
        if not self.reproduced:
            return "the difference did not come back when the same requests were run again"
        if self.culprits:
            return f"equal without {'; equal without '.join(self.culprits)}"
        return f"none alone; still different without {', without '.join(self.tried) or 'anything'}"


@dataclass(frozen=True)
class Suspect:
    """A part of the acceleration, and the policy without it. is_group: several that also stand alone."""

    name: str
    policy: AccelPolicy
    is_group: bool = False


def run_rounds(arm: Arm, rounds: Rounds) -> Iterator[Any]:
    """The results, one by one."""
    for requests in rounds:
        arm.refresh()
        for request in requests:
            yield arm.run(request)


def find_culprits(
    eager: Arm, policy: AccelPolicy, rounds: Rounds, *, record: StageRecord, progress: Progress
) -> Blame:
    """Run `rounds`, whose last result differed, once for every part that was active.

    record: of the stage whose output differed first, under `policy`. Only the last results are compared.
    An error ends the search, not the task.
    """
    suspects = suspects_of(policy, record)
    progress.start("blame", 1 + len(suspects))
    reproduced, ended_by = False, ""
    tried: list[str] = []
    culprits: list[str] = []
    try:
        reproduced = _differs(eager, policy, rounds)
        progress.advance("blame")
        for suspect in suspects if reproduced else ():
            # A group is of interest where none of its members is at fault alone.
            if not (suspect.is_group and culprits):
                differs = _differs(eager, suspect.policy, rounds)
                tried.append(suspect.name)
                if not differs:
                    culprits.append(suspect.name)
            progress.advance("blame")
    except Exception as error:  # e.g. no memory for one more pipeline: what was compared must stay
        ended_by = f"{type(error).__name__}: {error}".partition("\n")[0]
    progress.finish("blame")
    return Blame(reproduced, tuple(tried), tuple(culprits), ended_by)


def suspects_of(policy: AccelPolicy, record: StageRecord) -> list[Suspect]:
    """Every part that was active in the stage: its graphs, each fused kernel, and all that fusion brings."""
    found = []
    if any(outcome.kind in (Kind.REPLAYED, Kind.CAPTURED) for outcome in record.outcomes):
        graphless = _with(policy, record.name, enable_cuda_graph=False)
        found.append(Suspect(f"the graphs of '{record.name}'", graphless))
    for site in dict.fromkeys(outcome.site for outcome in record.sites if outcome.fused):
        found.append(Suspect(f"the kernel '{site}'", _unfused(policy, record.name, [site])))
    allowed = [site for site, on in policy.for_stage(record.name).fused.items() if on]
    if allowed:
        name = f"all fused kernels of '{record.name}' and the forwards mounted for them"
        found.append(Suspect(name, _unfused(policy, record.name, allowed), is_group=True))
    return found


def _unfused(policy: AccelPolicy, stage: str, sites: Sequence[str]) -> AccelPolicy:
    own = policy.stages.get(stage, StageOverride())
    return _with(policy, stage, fused={**own.fused, **dict.fromkeys(sites, False)})


def _with(policy: AccelPolicy, stage: str, **settings: Any) -> AccelPolicy:
    own = replace(policy.stages.get(stage, StageOverride()), **settings)
    return replace(policy, stages={**policy.stages, stage: own})


def _differs(eager: Arm, policy: AccelPolicy, rounds: Rounds) -> bool:
    with closing(eager.with_policy(policy)) as arm:
        for result in run_rounds(arm, rounds):
            last = result
    return first_difference(eager.run(rounds[-1][-1]), last) is not None
