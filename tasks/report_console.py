"""What `verify`, `bench` and `profile` show beside the header: lines of text and tables of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.table import Table
from rich.text import Text

from accel.record import RunRecord
from pipelines.termination import Terminated
from tasks.console import RunConsole
from tasks.stage_table import refusals


class ReportConsole(RunConsole):
    """Like `RunConsole`, with findings that are no stage table."""

    @contextmanager
    def interruptible(self, *, has_results: Callable[[], bool], write: Callable[[], None]) -> Iterator[None]:
        """Around a measurement: where the user ends it early, what there is so far is written first.

        Raises: KeyboardInterrupt, Terminated, afterwards.
        """
        try:
            yield
        except (KeyboardInterrupt, Terminated):
            if has_results():
                self.progress.stop()
                self.interrupted()
                write()
            raise

    def say(self, text: str = "", style: str = "") -> None:
        """One line, never wrapped."""
        self._line(text, style=style)

    def section(self, title: str, lines: Sequence[str]) -> None:
        """A heading over its lines; nothing where there are none."""
        if lines:
            self.say()
            self.say(title, style="bold")
        for line in lines:
            self.say(f"  {line}")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> None:
        """Cells are never cut, however narrow the console.

        text_columns: leading columns that hold words; the others hold numbers.
        """
        table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for number, title in enumerate(titles):
            table.add_column(title, justify="left" if number < text_columns else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        unlimited = self._console.options.update(max_width=10_000)
        table.width = self._console.measure(table, options=unlimited).maximum
        self._console.print(table, soft_wrap=True)


def refusal_lines(record: RunRecord) -> list[str]:
    """What ran eager or unfused though it was planned otherwise, and why."""
    lines = []
    for refusal in refusals(record):
        lines.append(refusal.line)
        if refusal.detail:
            lines.append(f"    {refusal.detail}")
    return lines
