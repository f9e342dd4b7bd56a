"""Progress for people: live bars on a terminal, a line at the start and the end of a piece elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class LiveProgress:
    """Bars that stay on the screen when they are done.

    Nothing redraws in the background: a drawing thread would take time from the steps that are
    being measured.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def start(self, name: str, total: int) -> None:
        if self._bars is None:
            self._bars = Bars(
                TextColumn("{task.description:<12}"),
                BarColumn(bar_width=36),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                auto_refresh=False,
            )
            self._bars.start()
        self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.refresh()

    def advance(self, name: str, n: int = 1) -> None:
        if self._bars is not None:
            self._bars.advance(self._tasks[name], n)
            self._bars.refresh()

    def finish(self, name: str) -> None:
        if self._bars is None:
            return
        self._bars.stop_task(self._tasks.pop(name))
        if not self._tasks:
            self.stop()

    def stop(self) -> None:
        """Leave the bars as they are and give the terminal back."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()


class LineProgress:
    """Writes "loading  0 of 7" when a piece starts and "loading  7 of 7  3.2 s" when it is finished."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: dict[str, tuple[float, int, int]] = {}

    def start(self, name: str, total: int) -> None:
        self._running[name] = (time.perf_counter(), 0, total)
        self._console.print(f"{name:<12} 0 of {total}")

    def advance(self, name: str, n: int = 1) -> None:
        started, done, total = self._running[name]
        self._running[name] = (started, done + n, total)

    def finish(self, name: str) -> None:
        started, done, total = self._running.pop(name)
        self._console.print(f"{name:<12} {done} of {total}  {time.perf_counter() - started:.1f} s")

    def stop(self) -> None:
        """Forget pieces that were cut short."""
        self._running.clear()
