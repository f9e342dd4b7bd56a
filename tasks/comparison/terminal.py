"""The comparison on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.comparison.rows import JobRow
from tasks.comparison.tables import TextTable, fallback_lines, job_table, problem, stage_tables

LoggerKind = Literal["rich", "plain", "quiet"]

_MAX_FALLBACKS = 12  # lines
_UNLIMITED = 10_000  # columns


def show(rows: Sequence[JobRow], folder: Path, *, logger: LoggerKind, file: TextIO) -> None:
    """Print the tables, then how many jobs succeeded and where the comparison is.

    logger: `rich` draws on a terminal and is `plain` where the output is not one; `quiet` shows problems,
        no tables.
    """
    console = Console(file=file, highlight=False) if logger == "rich" and file.isatty() else _plain(file)
    if logger == "quiet":
        _problems(console, rows)
    else:
        _tables(console, rows)
    succeeded = sum(row.status == "ok" for row in rows)
    console.print(
        Text(f"{succeeded} of {len(rows)} jobs succeeded; comparison in {folder / 'comparison.html'}"),
        soft_wrap=True,
    )


def _tables(console: Console, rows: Sequence[JobRow]) -> None:
    console.print()
    for table in (job_table(rows), *stage_tables(rows)):
        console.print(Text(table.title, style="bold"))
        for part in _parts(table, console.width):
            console.print(_drawn(part))
            console.print()
    lines = fallback_lines(rows)
    if lines:
        console.print(Text("Not accelerated", style="bold"))
    for line in lines[:_MAX_FALLBACKS]:
        console.print(Text(f"  {line}", style="yellow"), soft_wrap=True)
    if len(lines) > _MAX_FALLBACKS:
        console.print(Text(f"  and {len(lines) - _MAX_FALLBACKS} more; all are in comparison.html"))
    if lines:
        console.print()


def _plain(file: TextIO) -> Console:
    """No line is ever wrapped, so that all can be searched and cut."""
    return Console(
        file=file, width=_UNLIMITED, force_terminal=False, color_system=None, highlight=False, emoji=False
    )


def _problems(console: Console, rows: Sequence[JobRow]) -> None:
    for row in rows:
        if problem(row):
            console.print(Text(f"job {row.job} {row.status}: {problem(row)}"), soft_wrap=True)


def _parts(table: TextTable, width: int) -> list[TextTable]:
    """The table as one or, where it is too wide, as several below each other that repeat its keys."""
    widths = [
        2 + max(cell_len(text) for text in (column.title, *cells))
        for column, *cells in zip(table.columns, *table.rows, strict=True)
    ]
    keys = list(range(table.keys))
    parts = [keys]
    for column in range(table.keys, len(widths)):
        if parts[-1] != keys and sum(widths[n] for n in parts[-1]) + widths[column] > width:
            parts.append(keys)
        parts[-1] = [*parts[-1], column]
    return [table.with_columns(part) for part in parts]


def _drawn(table: TextTable) -> Table:
    drawn = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in table.columns:
        drawn.add_column(column.title, justify="right" if column.is_number else "left", overflow="fold")
    for number, row in enumerate(table.rows):
        following = table.rows[number + 1 : number + 2]
        # As `Text`, lest a name in brackets be taken for markup.
        drawn.add_row(*map(Text, row), end_section=bool(following) and _ends_group(table, row, following[0]))
    return drawn


def _ends_group(table: TextTable, row: tuple[str, ...], following: tuple[str, ...]) -> bool:
    """Rows of one stage stand together."""
    return table.columns[0].title == "stage" and row[0] != following[0]
