"""The comparison as one HTML page without server and network; only sorting and filtering need its script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from tasks.comparison import tables
from tasks.comparison.charts import WIDTH, ladders, memory_scatters, stage_stacks
from tasks.comparison.rows import JobRow
from tasks.number_text import count, mebibytes, milliseconds, percent, times

_TEMPLATES = Path(__file__).parent / "templates"


def to_html(rows: Sequence[JobRow]) -> str:
    return _template().render(
        rows=rows,
        succeeded=sum(row.status == "ok" for row in rows),
        stages=list(dict.fromkeys(figures.stage for row in rows for figures in row.figures)),
        fallbacks=tables.fallback_lines(rows),
        ladders=list(ladders(rows)),
        stacks=list(stage_stacks(rows)),
        scatters=list(memory_scatters(rows)),
        width=WIDTH,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    of_values = (milliseconds, count, times, percent, mebibytes)
    of_rows = (tables.note, tables.bits, tables.fallback_calls)
    environment.filters |= {filter_.__name__: filter_ for filter_ in (*of_values, *of_rows)}
    environment.filters["link"] = quote
    return environment.get_template("page.html.j2")
