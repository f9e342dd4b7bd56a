"""The tables of `task=profile`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.kernel_categories import short_name
from tasks.markdown_table import markdown_table
from tasks.number_text import milliseconds, percent
from tasks.stage_profile import KernelRow, StageProfile

_KERNELS = ("stage", "category", "kernel", "calls", "ms", "share")


@dataclass(frozen=True)
class Section:
    """A titled table. text_columns: leading columns that hold words."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]]
    text_columns: int = 1


def sections(stages: Sequence[StageProfile], *, top: int) -> list[Section]:
    """Stages, categories, the longest kernels and what could still be gained; empty ones are left out.

    top: kernels listed of each stage.
    """
    found = [
        Section("Stages", ("stage", "p50 ms", "busy ms", "idle ms", "idle"), [_stage(s) for s in stages]),
        Section(
            "By category",
            ("stage", "category", "ms", "share"),
            [r for s in stages for r in _categories(s)],
            2,
        ),
        Section("Longest", _KERNELS, [r for s in stages for r in _kernels(s.name, s.rows[:top])], 3),
        Section(
            "Fused kernels against a copy",
            ("stage", "ms", "MiB", "GB/s", "of a copy"),
            [row for stage in stages for row in _traffic(stage)],
        ),
        Section(
            "Could still be fused (elementwise, norm, reduction) or avoided (copy)",
            _KERNELS,
            [row for stage in stages for row in _kernels(stage.name, stage.unfused[:top])],
            3,
        ),
    ]
    return [section for section in found if section.rows]


def profile_markdown(found: Sequence[Section], *, title: str, notes: Sequence[str]) -> str:
    """The whole report as a Markdown page."""
    lines = [f"# {title}", "", *(f"- {note}" for note in notes)]
    for section in found:
        table = markdown_table(section.columns, section.rows, text_columns=section.text_columns)
        lines += ["", f"## {section.title}", "", *table]
    return "\n".join([*lines, ""])


def _stage(stage: StageProfile) -> list[str]:
    idle = stage.idle_ms
    share = percent(idle / stage.p50_ms if idle is not None and stage.p50_ms else None)
    return [stage.name, *map(milliseconds, (stage.p50_ms, stage.activity.busy_ms, idle)), share]


def _categories(stage: StageProfile) -> list[list[str]]:
    total = sum(stage.by_category.values())
    return [
        [stage.name, category, milliseconds(ms), f"{100 * ms / total:.1f} %"]
        for category, ms in stage.by_category.items()
        if ms
    ]


def _kernels(stage: str, rows: Sequence[KernelRow]) -> list[list[str]]:
    return [
        [
            stage,
            row.category,
            short_name(row.name),
            str(row.calls),
            milliseconds(row.ms),
            f"{100 * row.share:.1f} %",
        ]
        for row in rows
    ]


def _traffic(stage: StageProfile) -> list[list[str]]:
    if stage.traffic is None:
        return []
    traffic = stage.traffic
    return [
        [
            stage.name,
            milliseconds(traffic.ms),
            f"{sum(traffic.moved.values()) / 2**20:.1f}",
            f"{traffic.bandwidth / 1e9:.0f}",
            percent(traffic.bandwidth / traffic.copy_bandwidth),
        ]
    ]
