"""The comparison as GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tasks.comparison.rows import JobRow
from tasks.comparison.tables import TextTable, fallback_lines, job_table, stage_tables

_LINE_ENDS = re.compile(r"\r\n|\r|\n")
# An underscore within a word means nothing; names of stages stay readable in the file itself.
_SPECIAL = re.compile(r"[\\|&*`\[~]|(?<![^\W_])_|_(?![^\W_])")


def to_markdown(rows: Sequence[JobRow]) -> str:
    """The jobs, a table of stages a model, and what was not accelerated."""
    parts = ["# Comparison of a sweep\n"]
    parts += map(_table, (job_table(rows), *stage_tables(rows)))
    lines = fallback_lines(rows)
    if lines:
        parts.append("## Not accelerated\n\n" + "".join(f"- {_escaped(line)}\n" for line in lines))
    return "\n".join(parts)


def _table(table: TextTable) -> str:
    rule = ("---:" if column.is_number else "---" for column in table.columns)
    cells = (map(_escaped, row) for row in table.rows)
    lines = [" | ".join(row) for row in ((column.title for column in table.columns), rule, *cells)]
    return f"## {_escaped(table.title)}\n\n" + "".join(f"| {line} |\n" for line in lines)


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", _LINE_ENDS.sub(" ", text)).replace("<", "&lt;")
