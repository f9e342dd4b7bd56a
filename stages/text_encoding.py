"""What text-encoding stages share: a cache of encoded captions bounded by tokens."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class CaptionCache(Generic[T]):
    """Least-recently-used cache keyed by the exact caption string.

    token_budget: upper bound of cached tokens, padding included; 0 keeps nothing.
    Entries are shared, not copied: callers must not write into them. One thread at a time.
    """

    def __init__(self, *, token_budget: int) -> None:
        self._token_budget = token_budget
        self._entries: OrderedDict[str, tuple[int, T]] = OrderedDict()
        self._tokens = 0
        self.hits = 0
        self.misses = 0

    @property
    def tokens(self) -> int:
        """Tokens held now."""
        return self._tokens

    def get(self, caption: str) -> T | None:
        """The cached value, marked as most recent, or None."""
        entry = self._entries.get(caption)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(caption)
        return entry[1]

    def put(self, caption: str, value: T, *, tokens: int) -> None:
        """Keep `value`, dropping the least recent captions until the budget holds.

        A caption larger than the whole budget is not kept.
        """
        self._drop(caption)
        if tokens > self._token_budget:
            return
        while self._tokens + tokens > self._token_budget:
            self._drop(next(iter(self._entries)))
        self._entries[caption] = (tokens, value)
        self._tokens += tokens

    def clear(self) -> None:
        """Drop every caption; the counters go on."""
        self._entries.clear()
        self._tokens = 0

    def _drop(self, caption: str) -> None:
        entry = self._entries.pop(caption, None)
        if entry is not None:
            self._tokens -= entry[0]
