"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1
) -> list[str]:
    """Lines of a table. text_columns: leading columns that hold words; the others hold numbers."""
    rules = ["---" if number < text_columns else "---:" for number in range(len(titles))]
    return [_line(titles), _line(rules), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
