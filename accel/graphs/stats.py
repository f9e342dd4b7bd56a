"""What the graphs of a region did and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from accel.graphs.tree import Key

# A graph that saves less is reported: it holds memory for nothing (graph spec section 1).
MIN_GAIN = 0.03


@dataclass(kw_only=True)
class EntryStats:
    """One live graph.

    arguments: the call it serves, as in `Signature.arguments`. nbytes: device memory of the graph and
    its fixed inputs. copied_in, copied_out: bytes per replay; less is copied in where a persistent
    input has not changed. capture_ms: everything from warm-up to proof. eager_ms, replay_ms: wall time of one
    call and one replay, device synchronised at both ends. last_used: seconds since the epoch.
    """

    arguments: Key
    copied_in: int
    copied_out: int
    eager_ms: float
    replay_ms: float
    nbytes: int = 0
    capture_ms: float = 0.0
    replays: int = 0
    last_used: float = 0.0

    @property
    def gain(self) -> float:
        """Part of the eager time that a replay saves; negative where it is slower."""
        return 1 - self.replay_ms / self.eager_ms if self.eager_ms else 0.0

    @property
    def worth_it(self) -> bool:
        return self.gain >= MIN_GAIN


@dataclass(frozen=True, kw_only=True)
class GraphStats:
    """Counts since the region was bound, and the graphs that live now.

    misses: calls whose signature had no graph, whatever then ran them. captures: graphs that were kept.
    failures: attempts that left none. blocked: why signatures are not tried again, newest last.
    extra_bytes: device memory of all graphs and fixed inputs. capture_ms: time spent on captures.
    """

    hits: int
    misses: int
    captures: int
    failures: int
    evictions: int
    blocked: tuple[str, ...]
    extra_bytes: int
    capture_ms: float
    entries: tuple[EntryStats, ...]

    @property
    def not_worth_it(self) -> tuple[EntryStats, ...]:
        """Graphs that save less than `MIN_GAIN`."""
        return tuple(entry for entry in self.entries if not entry.worth_it)
