"""actions.png: every channel of a chunk over time, beside the observed state."""

from __future__ import annotations

import io
import math
import warnings
from textwrap import shorten
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pipelines.flux3_action.outputs import GRIPPER, Channel, Floats, Origin, action_times
from pipelines.flux3_action.request import ActionResult

# Okabe and Ito's palette: told apart with every common colour vision.
ACTION, STATE = "#0072B2", "#D55E00"
INK, QUIET, GRID = "#1A1A1A", "#6B6B6B", "#E4E4E4"

PANEL_WIDTH, PANEL_HEIGHT, HEADER_HEIGHT = 3.1, 2.2, 1.08  # inches
COLUMNS = 4
SMALLEST_SPAN = 0.1  # of the y axis, so that noise does not fill a panel


def draw_actions(result: ActionResult, *, channels: tuple[Channel, ...], origin: Origin) -> bytes:
    """Draw the chunk as PNG. Channels of one unit span equal ranges, so their motions compare."""
    columns = min(COLUMNS, len(channels))
    rows = math.ceil(len(channels) / columns)
    width, height = max(columns, 3) * PANEL_WIDTH, rows * PANEL_HEIGHT + HEADER_HEIGHT
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    figure.subplots_adjust(
        left=0.62 / width,
        right=1 - 0.2 / width,
        bottom=0.5 / height,
        top=1 - (HEADER_HEIGHT + 0.22) / height,
        wspace=0.3,
        hspace=0.34,
    )
    spans = _spans(result, channels)
    for index, (panel, channel) in enumerate(zip(panels, channels, strict=False)):
        first = index % columns == 0 or channels[index - 1].unit != channel.unit
        last = index + columns >= len(channels)
        _panel(panel, result, index, channel, span=spans[channel.unit])
        panel.set_ylabel(channel.unit if first else "", fontsize=8.5, color=QUIET)
        panel.set_xlabel("seconds" if last else "", fontsize=8.5, color=QUIET)
        panel.tick_params(labelbottom=last)
    for panel in panels[len(channels) :]:
        panel.set_axis_off()
    _header(figure, result, origin)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of prompts; they show as boxes
        figure.savefig(buffer, format="png", metadata={"Software": "samebit", "Title": result.prompt})
    return buffer.getvalue()


def _panel(panel: Axes, result: ActionResult, index: int, channel: Channel, *, span: float) -> None:
    actions, state = result.actions[:, index], float(result.state[index])
    times = action_times(result)
    end = float(times[-1])
    panel.plot([0, end], [state, state], color=STATE, lw=1, ls=(0, (4, 3)), alpha=0.75, zorder=2)
    panel.plot([0, times[0]], [state, actions[0]], color=ACTION, lw=1, ls=":", zorder=2)
    panel.plot(times, actions, color=ACTION, lw=1.6, marker="o", ms=2.6, zorder=3)
    panel.plot([0], [state], color=STATE, marker="o", ms=6, mec="white", mew=1, zorder=4, clip_on=False)
    panel.set_xlim(0, end * 1.02)
    panel.set_ylim(*_limits(actions, state, channel, span))
    panel.set_title(channel.name, loc="left", fontsize=10, fontweight="bold", color=INK, pad=5)
    change = round(float(actions[-1]) - state, 2) + 0.0  # no "-0.00"
    panel.set_title(
        f"Δ {change:+.2f}".replace("-", "\N{MINUS SIGN}"), loc="right", fontsize=8.5, color=QUIET, pad=5
    )
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.yaxis.set_major_locator(MaxNLocator(5))
    panel.grid(color=GRID, lw=0.7)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8, labelcolor=QUIET, color=GRID, length=3)
    for side, spine in panel.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#BDBDBD")


def _spans(result: ActionResult, channels: tuple[Channel, ...]) -> dict[str, float]:
    """Unit -> range that the y axis of each of its channels covers."""
    spans: dict[str, float] = {}
    for index, channel in enumerate(channels):
        low, high = _extent(result.actions[:, index], float(result.state[index]))
        spans[channel.unit] = max(spans.get(channel.unit, SMALLEST_SPAN), (high - low) * 1.16)
    return spans


def _limits(actions: Floats, state: float, channel: Channel, span: float) -> tuple[float, float]:
    low, high = _extent(actions, state)
    if channel == GRIPPER:
        return min(low, 0.0) - 0.06, max(high, 1.0) + 0.06
    middle = (low + high) / 2
    return middle - span / 2, middle + span / 2


def _extent(actions: Floats, state: float) -> tuple[float, float]:
    return min(float(actions.min()), state), max(float(actions.max()), state)


def _header(figure: Figure, result: ActionResult, origin: Origin) -> None:
    width, height = figure.get_size_inches()
    left, right = 0.2 / width, 1 - 0.2 / width
    prompt = shorten(result.prompt, int(7 * width), placeholder=" ...") or "(no prompt)"
    facts = f"{len(result.actions)} actions at {result.fps:g} Hz  ·  seed {result.seed}"
    facts += f"  ·  config {origin.config_hash[:12]}"

    def line(x: float, inches: float, text: str, **style: Any) -> None:
        # A prompt may hold dollar signs; it is text, not mathematics.
        figure.text(x, 1 - inches / height, text, va="baseline", parse_math=False, **style)

    line(left, 0.36, prompt, fontsize=14, fontweight="bold", color=INK)
    line(left, 0.61, facts, fontsize=9.5, color=QUIET)
    line(left, 0.86, origin.note_on(result), fontsize=9.5, fontweight="bold", color=STATE)
    figure.legend(
        handles=[
            Line2D([], [], color=ACTION, lw=1.6, marker="o", ms=3.5, label="action"),
            Line2D([], [], color=STATE, lw=1, ls="--", marker="o", ms=6, mec="white", label="observed state"),
        ],
        loc="upper right",
        bbox_to_anchor=(right, 1 - 0.47 / height),
        borderaxespad=0,
        ncols=2,
        frameon=False,
        fontsize=9,
    )
