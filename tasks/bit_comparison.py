"""Eager and accelerated results of the same requests, compared down to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.policy import AccelPolicy
from pipelines.progress import NULL_PROGRESS, Progress
from tasks.arms import Arm
from tasks.blame import Blame, Rounds, find_culprits, run_rounds
from tasks.differences import FILES, Difference, breaks_promise, first_difference, first_file_difference

ROUNDS = 2  # the first captures graphs; the second replays them, and compares files too


@dataclass(frozen=True)
class Visit:
    """One request, run by both arms. request: its number. outputs: stage outputs compared."""

    request: int
    outputs: int
    difference: Difference | None


@dataclass
class Comparison:
    """An eager and an accelerated pipeline side by side.

    requests: run in order, then in order again, so that every signature is captured and replayed with others
        in between. config_hash: for output files.
    visits: what was compared so far. eager_unequal: outputs in which eager differs from itself.
    blame: of the first difference that breaks a promise.
    """

    eager: Arm
    accelerated: Arm
    requests: Sequence[Any]
    config_hash: str
    visits: list[Visit] = field(default_factory=list)
    eager_unequal: set[str] = field(default_factory=set)
    blame: Blame | None = None

    def run(self, *, progress: Progress = NULL_PROGRESS) -> None:
        """Compare everything. Can be interrupted at any point; what was compared before stays."""
        rounds = [self.requests] * ROUNDS
        first: dict[int, Any] = {}
        progress.start("comparisons", ROUNDS * len(self.requests))
        pairs = zip(run_rounds(self.eager, rounds), run_rounds(self.accelerated, rounds), strict=True)
        for number, (expected, actual) in enumerate(pairs):
            request = number % len(self.requests)
            digests = first.setdefault(request, expected.digests)
            self.eager_unequal |= {name for name, _ in digests.items() ^ expected.digests.items()}
            difference = first_difference(expected, actual)
            if difference is None and number >= len(self.requests):
                difference = self._file_difference(expected, actual)
            self.visits.append(Visit(request, len(expected.outputs), difference))
            progress.advance("comparisons")
        progress.finish("comparisons")

    def find_culprits(self, policy: AccelPolicy, *, progress: Progress = NULL_PROGRESS) -> None:
        """Set `blame`; nothing to do where all promises are kept or eager can't repeat itself.

        policy: of the accelerated pipeline.
        """
        found = self.broken
        if found is None or found[1].stage == FILES or self.eager_unequal:
            return
        number, difference = found
        self.blame = find_culprits(
            self.eager,
            policy,
            self._until(number),
            record=self.accelerated.record.stage(difference.stage),
            progress=progress,
        )

    @property
    def differences(self) -> list[tuple[int, Difference]]:
        """(number of the visit, difference), in the order of the comparisons."""
        return [(number, visit.difference) for number, visit in enumerate(self.visits) if visit.difference]

    @property
    def broken(self) -> tuple[int, Difference] | None:
        """The first of `differences` where the tier promises equal bits."""
        record = self.accelerated.record
        return next(
            ((n, found) for n, found in self.differences if breaks_promise(found.stage, record)), None
        )

    def _file_difference(self, expected: Any, actual: Any) -> Difference | None:
        return first_file_difference(
            self.eager.files(expected, config_hash=self.config_hash),
            self.accelerated.files(actual, config_hash=self.config_hash),
        )

    def _until(self, visit: int) -> Rounds:
        """The requests up to that visit."""
        complete, more = divmod(visit + 1, len(self.requests))
        return [*[self.requests] * complete, *([self.requests[:more]] if more else [])]
