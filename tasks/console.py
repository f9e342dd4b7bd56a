"""What a run shows: a header, progress, the stage table, and where the results are."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel.policy import AccelPolicy
from accel.record import RunRecord, StageRecord
from accel.selection import Choice
from accel.site_names import SAVING_NAMES, SITE_NAMES
from pipelines.auto_policy import AutoChoice
from pipelines.pipeline import PipelineDescription
from tasks.config import RunConfig, config_hash
from tasks.environment import device_facts, software
from tasks.number_text import NONE
from tasks.progress_bars import LineProgress, LiveProgress
from tasks.stage_table import StageRow, break_lines, graph_lines, refusals, stage_rows, total_row

LoggerKind = Literal["rich", "plain", "quiet"]

PLAIN_WIDTH = 80
_TIMES = {"p50": "p50", "p95": "p95", "cold": "cold"}
_CUDA = {"launches": "launches", "host": "host", "busy": "GPU busy", "extra_mib": "extra MiB"}
_OUTCOMES = {"graphs": "graphs", "fused": "fused"}


class RunConsole:
    """Prints one run.

    kind: `rich` draws on a terminal and is `plain` where the output is not one; `plain` is text
    without escapes, 80 columns; `quiet` prints the result's path alone.
    """

    def __init__(self, kind: LoggerKind, *, file: TextIO | None = None) -> None:
        file = file or sys.stdout
        live = kind == "rich" and file.isatty()
        self._console = Console(file=file, highlight=False) if live else _plain(file)
        self._always = self._console
        if kind == "quiet":
            self._console = Console(file=file, quiet=True)
        self.progress = LiveProgress(self._console) if live else LineProgress(self._console)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def begin(self, config: RunConfig) -> None:
        """Before anything is loaded."""
        self.header(config_hash=config_hash(config), accel=config.accel, software=software())

    def built(self, description: PipelineDescription) -> None:
        """Once the pipeline is there."""
        self.pipeline(description, device_facts(description.device))

    def header(self, *, config_hash: str, accel: AccelPolicy, software: Mapping[str, str]) -> None:
        """Before anything is loaded."""
        self._facts(
            {
                "samebit": software.get("samebit", "not installed"),
                "config": config_hash,
                "accel": _accel(accel),
                "versions": ", ".join(f"{k} {v}" for k, v in software.items() if k != "samebit"),
            }
        )

    def pipeline(self, description: PipelineDescription, device: Mapping[str, Any]) -> None:
        """What was built, once it is known."""
        self._facts(
            {
                "model": f"{description.model}, size {description.size} ({description.size_reason})",
                "weights": description.weights,
                "device": _device(device),
                "dtype": description.dtype,
            }
        )
        if description.outputs_mean_nothing:
            self._line("The weights are synthetic: the outputs mean nothing.", style="bold yellow")

    def report(
        self,
        record: RunRecord,
        request: StageRecord,
        *,
        unequal: Sequence[str],
        not_worth_it: Sequence[str] = (),
    ) -> None:
        """The stage table, what was not accelerated, what the graphs are like, and whether repeats agreed."""
        self.progress.stop()
        rows, total = stage_rows(record), total_row(record, request)
        cuda = any(row.launches != NONE or row.extra_mib != "0" for row in rows)
        times = _TIMES | _CUDA if cuda else _TIMES
        outcomes = _OUTCOMES if {row.tier for row in rows} <= {"exact"} else {"tier": "tier", **_OUTCOMES}
        self._console.print()
        self._line(f"Wall time in ms: {_requests(len(request.walls_ms))}.")
        self._console.print()
        for table in self._fitting(
            [_table(rows, total, times | outcomes)],
            [_table(rows, total, times), _table(rows, None, outcomes)],
            [_table(rows, total, times), *(_table(rows, None, {key: outcomes[key]}) for key in outcomes)],
        ):
            self._console.print(table)
            self._console.print()
        self._refusals(record)
        self._graphs(record, not_worth_it)
        self._repeats(1 + len(request.walls_ms), unequal)

    def choice(self, choice: AutoChoice) -> None:
        """What `accel=auto` chose for each stage, and why."""
        self.progress.stop()
        self._console.print()
        self._line(f"accel=auto measured for {choice.seconds:.1f} s and chose:", style="bold")
        for name, chosen in choice.stages.items():
            self._line(f"  {name}: {chosen.candidate}")
            self._line(f"      {chosen.reason}{_measured(chosen)}")
        for candidate, why in choice.not_tried.items():
            self._line(f"  not tried: {candidate}: {why}", style="yellow")

    def notes(self, notes: Sequence[str]) -> None:
        """What the user should know of the result."""
        for note in notes:
            self._line(f"Note: {note}", style="yellow")

    def interrupted(self) -> None:
        self._line("Interrupted; this is what was measured so far.", style="bold yellow")

    def written(self, folder: Path, names: Sequence[str]) -> None:
        """Where the results are; shown whatever the logger."""
        self._line(f"Wrote {', '.join(_numbered_together(names))}")
        self._always.print(Text(str(folder)), soft_wrap=True)

    def _fitting(self, *layouts: list[Table]) -> list[Table]:
        """Cells are never cut: the first layout whose tables are all narrow enough, else the last."""
        unlimited = self._console.options.update(max_width=10_000)

        def fits(table: Table) -> bool:
            return self._console.measure(table, options=unlimited).maximum <= self._console.width

        return next((layout for layout in layouts if all(map(fits, layout))), layouts[-1])

    def _refusals(self, record: RunRecord) -> None:
        found = refusals(record)
        if found:
            self._line("Not accelerated", style="bold")
        for refusal in found:
            self._line(f"  {refusal.line}", style="yellow")
            if refusal.detail:
                self._line(f"      {refusal.detail}")
        if found:
            self._console.print()

    def _graphs(self, record: RunRecord, not_worth_it: Sequence[str]) -> None:
        sections = {
            "Breaks between graphs": break_lines(record),
            "Graphs that gain little": not_worth_it,
            "Graphs": graph_lines(record),
        }
        for title, lines in sections.items():
            if lines:
                self._line(title, style="bold")
                for line in lines:
                    self._line(f"  {line}")
                self._console.print()

    def _repeats(self, requests: int, unequal: Sequence[str]) -> None:
        if unequal:
            self._line(f"UNEQUAL between {requests} like requests: {', '.join(unequal)}", style="bold red")
        elif requests > 1:
            self._line(f"{requests} like requests: all outputs equal, bit for bit.", style="green")
        else:
            self._line("1 request; nothing to compare.")

    def _facts(self, facts: Mapping[str, str]) -> None:
        for name, value in facts.items():
            self._console.print(Text.assemble((f"{name:<9}", "bold"), value), soft_wrap=True)

    def _line(self, text: str, *, style: str = "") -> None:
        # Never wrapped: reasons and paths stay in one piece for copying and searching.
        self._console.print(Text(text, style=style), soft_wrap=True)


def _plain(file: TextIO) -> Console:
    """Text whatever the terminal and the environment: no escapes, one width."""
    return Console(
        file=file, force_terminal=False, color_system=None, width=PLAIN_WIDTH, highlight=False, emoji=False
    )


def _numbered_together(names: Sequence[str]) -> Iterator[str]:
    """Neighbouring names that differ in their numbers alone, from three on as the first and the last."""
    for _, group in groupby(names, key=lambda name: re.sub(r"\d+", "#", name)):
        alike = list(group)
        yield from [f"{alike[0]} to {alike[-1]}"] if len(alike) > 2 else alike


def _table(rows: Sequence[StageRow], total: StageRow | None, columns: Mapping[str, str]) -> Table:
    table = Table(
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        show_footer=total is not None,
        footer_style="bold",
    )
    for column, title in {"stage": "stage", **columns}.items():
        table.add_column(
            title,
            footer=getattr(total, column, ""),
            justify="right" if column in _TIMES | _CUDA else "left",
            no_wrap=True,
        )
    for row in rows:
        # As `Text`, lest a name in brackets be taken for markup.
        table.add_row(*(Text(getattr(row, column)) for column in ("stage", *columns)))
    return table


def _requests(steady: int) -> str:
    """Which requests the columns of times are about."""
    if steady == 0:
        return "cold of the only request"
    return f"p50 and p95 of {steady} request{'s' if steady > 1 else ''}, cold of the first one"


def _accel(accel: AccelPolicy) -> str:
    if accel.auto_seconds is not None:
        return f"{accel.name}, tier {accel.tier} (chosen by measuring, auto_seconds={accel.auto_seconds:g})"
    graphs = (
        f"{accel.graph_mode} graphs, {accel.max_entries} a region" if accel.enable_cuda_graph else "no graphs"
    )
    return f"{accel.name}, tier {accel.tier} ({graphs}; {_fused(accel.fused)})"


def _fused(switches: Mapping[str, bool]) -> str:
    """Which kernels are allowed, in few words, and every saving by name."""
    allowed = [name for name in SITE_NAMES if switches.get(name)]
    barred = [name for name in SITE_NAMES if not switches.get(name)]
    savings = [name for name in SAVING_NAMES if switches.get(name)]
    if len(allowed) <= len(barred):
        fused = f"fused: {', '.join(allowed) or 'nothing'}"
    else:
        fused = "fused: all sites" + (f" but {', '.join(barred)}" if barred else "")
    return "; ".join([fused, f"savings: {', '.join(savings)}"] if savings else [fused])


def _measured(choice: Choice) -> str:
    """What speaks for a choice in numbers."""
    measured, eager = choice.measured, choice.eager_ms
    if measured is None or eager is None:
        return ""
    facts = {
        f"{eager * measured.relative:.2f} ms, eager {eager:.2f}; medians of {measured.calls}": True,
        f"{measured.launches} launches": measured.launches is not None,
        f"GPU busy {measured.gpu_busy_ms or 0:.2f} ms": measured.gpu_busy_ms is not None,
        f"{measured.copied_in / 2**20:.1f} MiB copied in a replay": bool(measured.copied_in),
        f"{measured.held_bytes / 2**20:.0f} MiB held": bool(measured.held_bytes),
    }
    return f" ({', '.join(fact for fact, known in facts.items() if known)})"


def _device(facts: Mapping[str, Any]) -> str:
    if "memory_bytes" in facts:
        memory = f"{facts['memory_bytes'] / 2**30:.0f} GiB"
        driver = f", driver {facts['driver']}" if facts["driver"] else ""
        return f"{facts['device']}, {facts['name']}, {memory}, sm {facts['capability']}{driver}"
    return f"cpu, {facts['cores']} cores, {facts['threads']} in use, {facts['capability']}"
