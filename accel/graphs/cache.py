"""The bounded sets a region keeps: its graphs, and the signatures that failed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from accel.graphs.signature import Signature
from accel.policy import OnFull

E = TypeVar("E")
V = TypeVar("V")

# A capture costs several eager runs; so many calls keep that to about a tenth of the time.
CALLS_PER_CAPTURE = 64


class GraphCache(Generic[E]):
    """Entries by signature, least recently replayed first, and how often it was asked.

    At most `3 * max_entries` captures are begun, and one more for every `CALLS_PER_CAPTURE` calls, so
    that a workload with too many signatures, or weights that keep changing, runs eager instead of
    capturing all the time.
    """

    def __init__(self, *, max_entries: int, on_full: OnFull) -> None:
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._max_entries = max_entries
        self._on_full = on_full
        self._entries: OrderedDict[Signature, E] = OrderedDict()
        self._begun = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Signature]:
        return iter(self._entries)

    def peek(self, signature: Signature) -> E | None:
        """The entry of this signature; counts for nothing."""
        return self._entries.get(signature)

    def get(self, signature: Signature) -> E | None:
        """The entry that serves this signature, marked as just replayed."""
        entry = self._entries.get(signature)
        if entry is None:
            self.misses += 1
        else:
            self.hits += 1
            self._entries.move_to_end(signature)
        return entry

    def entries(self) -> list[E]:
        return list(self._entries.values())

    def add(self, signature: Signature, entry: E) -> None:
        self._entries[signature] = entry

    def has_room(self) -> bool:
        """Whether a new entry may be captured, if need be after `make_room`."""
        if self._begun >= 3 * self._max_entries + (self.hits + self.misses) // CALLS_PER_CAPTURE:
            return False
        return len(self._entries) < self._max_entries or self._on_full == "evict"

    def make_room(self) -> list[E]:
        """Before a capture: take out the least recently replayed entry if the cache is full.

        The caller destroys it.
        """
        self._begun += 1
        if len(self._entries) < self._max_entries:
            return []
        self.evictions += 1
        return [self._entries.popitem(last=False)[1]]

    def clear(self) -> list[E]:
        """Take out all entries. The caller destroys them."""
        entries = self.entries()
        self._entries.clear()
        return entries


class MemoryBudget:
    """Device memory that graphs may hold together; one budget serves all regions of a stage.

    held: bytes.
    """

    def __init__(self, limit_mb: int | None) -> None:
        self.held = 0
        self._limit = None if limit_mb is None else limit_mb << 20

    @property
    def limited(self) -> bool:
        return self._limit is not None

    def excess(self) -> str:
        """In words, e.g. "graphs would hold 1230 MiB of 1024 MiB"; empty while within the limit."""
        if self._limit is None or self.held <= self._limit:
            return ""
        return f"graphs would hold {self.held / 2**20:.1f} MiB of {self._limit >> 20} MiB"


class BlockList:
    """Signatures that must not be captured again, and whether the region has failed too often.

    Three signatures that failed for the same cause disable the region: later signatures run eager,
    graphs that exist keep serving.
    """

    _STRIKES = 3
    _MAX_SIGNATURES = 64

    def __init__(self) -> None:
        self._blocked: OrderedDict[Signature, str] = OrderedDict()
        self._spoiled: OrderedDict[Signature, None] = OrderedDict()
        self._strikes: Counter[str] = Counter()
        self._disabled = ""

    def reasons(self) -> tuple[str, ...]:
        """All there is to say, newest last."""
        return (*self._blocked.values(), *filter(None, [self._disabled]))

    def reason(self, signature: Signature) -> str:
        """Why this signature may not be captured; empty if it may."""
        return self._blocked.get(signature, "") or self._disabled

    def block(self, signature: Signature, why: str, *, cause: str) -> None:
        """cause: failures that count together, e.g. an exception class; empty counts for nothing."""
        _put(self._blocked, signature, why, self._MAX_SIGNATURES)
        if not cause:
            return
        self._strikes[cause] += 1
        if self._strikes[cause] == self._STRIKES:
            self.disable(f"{self._STRIKES} signatures failed alike, the last one with: {why}")

    def forgive_once(self, signature: Signature) -> bool:
        """For captures that another thread spoiled: True the first time, when a retry is due."""
        if signature in self._spoiled:
            return False
        _put(self._spoiled, signature, None, self._MAX_SIGNATURES)
        return True

    def disable(self, why: str) -> None:
        """Capture nothing more."""
        self._disabled = why


def _put(entries: OrderedDict[Signature, V], signature: Signature, value: V, limit: int) -> None:
    """Insert; forget the oldest beyond the limit."""
    entries[signature] = value
    if len(entries) > limit:
        entries.popitem(last=False)
