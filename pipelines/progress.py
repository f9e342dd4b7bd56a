"""How long work tells whoever watches that it goes on."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives progress. Work of different names may nest; one name runs once at a time."""

    def start(self, name: str, total: int) -> None:
        """`total` units of `name` lie ahead, total >= 1."""

    def advance(self, name: str, n: int = 1) -> None:
        """`n` more units of `name` are done."""

    def finish(self, name: str) -> None:
        """`name` is over."""


class NullProgress:
    """Progress that nobody watches."""

    def start(self, name: str, total: int) -> None:
        pass

    def advance(self, name: str, n: int = 1) -> None:
        pass

    def finish(self, name: str) -> None:
        pass


NULL_PROGRESS = NullProgress()
