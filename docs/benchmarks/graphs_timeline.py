"""What the host and the GPU do during the denoising of one FLUX 3 Action request, eager and as a graph.

    python docs/benchmarks/graphs_timeline.py record SPANS.json    # on a CUDA machine, at full size
    python docs/benchmarks/graphs_timeline.py draw SPANS.json docs/images/graphs_timeline.png

`record` profiles one warm denoising stage of each policy (synthetic bf16 weights, DROID shapes, 4 steps) and
writes every launch and every kernel as [start, duration] in tenths of a microsecond. `draw` needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ARMS = ("eager", "graph")
STAGE = "denoising"
WARM_UPS = 3
TICKS_PER_US = 10
# What hands work to the GPU, in the CUDA runtime's and driver's words.
LAUNCHES = ("Launch", "Memcpy", "Memset")

HOST, GPU, INK = "#c8743c", "#2f6f9f", "#333333"
BINS, ZOOM_MS = 240, 1.2


def record(out: Path) -> None:
    """Profile both policies, which share the weights, and write the spans."""
    import torch

    from pipelines.flux3_action.observation import parse_observation
    from pipelines.flux3_action.observation_files import load_episode_frame
    from pipelines.flux3_action.pipeline import Flux3ActionPipeline
    from pipelines.flux3_action.weights import load_components
    from pipelines.pipeline import Placement
    from pipelines.weights_config import WeightsConfig
    from tasks.config import compose
    from tasks.environment import device_facts, software

    device, dtype = torch.device("cuda", 0), torch.bfloat16
    components = load_components(
        weights=WeightsConfig(kind="synthetic"), variant="base", size="full", device=device, dtype=dtype
    )
    arms = []
    for name in ARMS:
        pipeline = Flux3ActionPipeline(
            components,
            policy=compose(f"accel={name}").accel,
            placement=Placement(device=device, dtype=dtype, size="full", size_reason="benchmark"),
            outputs_mean_nothing=True,
        )
        raw = dict(load_episode_frame(ROOT / "data" / "panda_lift", 0))
        request = pipeline.request(parse_observation(raw, pipeline.config), seed=0)
        for _ in range(WARM_UPS):
            pipeline.run(request)
        arms.append({"name": name} | _profile(pipeline, request))
        pipeline.close()
    facts = device_facts(str(device))
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "device": facts["name"],
        "driver": facts["driver"],
        "torch": software()["torch"],
        "arms": arms,
    }
    out.write_text(json.dumps(report, separators=(",", ":")) + "\n")
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")


def _profile(pipeline: Any, request: Any) -> dict[str, list[list[int]]]:
    """Run the stages before the profiled one as ever; `host` and `gpu` spans from the first launch on."""
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity

    from pipelines.progress import NULL_PROGRESS

    with torch.inference_mode():
        state = pipeline._begin(request, NULL_PROGRESS)
        for stage in pipeline.stages:
            if stage.name == STAGE:
                break
            stage.run(state)
        torch.cuda.synchronize()
        # CUDA alone: recording every PyTorch operation would slow the host down.
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profile:
            stage.run(state)
            torch.cuda.synchronize()
    host, gpu = [], []
    for event in profile.events() or ():
        span = (event.time_range.start, event.time_range.end - event.time_range.start)
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            gpu.append(span)
        elif event.name.startswith("cu") and any(word in event.name for word in LAUNCHES):
            host.append(span)
    start = min(begin for begin, _ in host + gpu)
    return {
        kind: sorted(
            [round((begin - start) * TICKS_PER_US), round(length * TICKS_PER_US)] for begin, length in spans
        )
        for kind, spans in (("host", host), ("gpu", gpu))
    }


def draw(spans: Path, png: Path) -> None:
    """Above, the share of time with a launch or a kernel under way; below, a few kernels one by one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    report = json.loads(spans.read_text())
    arms = [_Arm(**arm) for arm in report["arms"]]
    plt.rcParams.update(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    )
    figure = plt.figure(figsize=(10, 6.4), dpi=150)
    rows = figure.add_gridspec(5, 1, height_ratios=(1, 1, 0.12, 0.62, 0.62), hspace=0.55)
    overview = [figure.add_subplot(rows[row]) for row in (0, 1)]
    zoom = [figure.add_subplot(rows[row]) for row in (3, 4)]
    for axes, arm in zip(overview, arms, strict=True):
        _draw_shares(axes, arm, end=max(arm.end for arm in arms))
    for axes, arm in zip(zoom, arms, strict=True):
        _draw_spans(axes, arm)
    for pair, text in ((overview, "ms since the first launch"), (zoom, "ms, from the same kernel on")):
        pair[0].tick_params(labelbottom=False)
        pair[1].set_xlabel(text)
    figure.suptitle(
        "FLUX 3 Action, denoising of one request: "
        f"{report['device']}, torch {report['torch']}, {report['date']}",
        x=0.075, y=0.965, ha="left", fontsize=11,
    )  # fmt: skip
    figure.subplots_adjust(left=0.075, right=0.985, top=0.885, bottom=0.08)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)


class _Arm:
    """Spans in ms."""

    def __init__(self, name: str, host: list[list[int]], gpu: list[list[int]]) -> None:
        per_ms = 1e3 * TICKS_PER_US
        self.name = name
        self.host = [(begin / per_ms, length / per_ms) for begin, length in host]
        self.gpu = [(begin / per_ms, length / per_ms) for begin, length in gpu]
        self.end = max(begin + length for begin, length in self.host + self.gpu)

    @property
    def title(self) -> str:
        from accel.measure.profile import busy_time

        busy = busy_time((begin, begin + length) for begin, length in self.gpu)
        launches, kernels = len(self.host), len(self.gpu)
        return (
            f"{self.name}: {self.end:.1f} ms, GPU busy {100 * busy / self.end:.0f} %, "
            f"{launches:,} {'launch' if launches == 1 else 'launches'} by the host, {kernels:,} kernels"
        )


def _draw_shares(axes: Any, arm: _Arm, *, end: float) -> None:
    edges = [end * i / BINS for i in range(BINS + 1)]
    for row, (label, spans, colour) in enumerate((("GPU", arm.gpu, GPU), ("host", arm.host, HOST))):
        heights = [row + 0.8 * share for share in _shares(spans, edges)]
        axes.fill_between(edges, row, [*heights, row], step="post", color=colour, linewidth=0)
        axes.axhline(row, color=INK, linewidth=0.5)
        axes.text(-0.008, row + 0.4, label, transform=axes.get_yaxis_transform(), ha="right", va="center")
    axes.axvline(arm.end, color=INK, linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, end * 1.005), ylim=(0, 2), yticks=[])
    axes.set_title(arm.title, loc="left", fontsize=9, fontweight="bold")


def _shares(spans: list[tuple[float, float]], edges: list[float]) -> list[float]:
    """Covered part of every bin; spans of one lane hardly overlap, so that they may be summed."""
    width, covered = edges[1], [0.0] * BINS
    for begin, length in spans:
        end = begin + length
        for i in range(int(begin / width), min(int(end / width) + 1, BINS)):
            covered[i] += max(0.0, min(end, edges[i + 1]) - max(begin, edges[i]))
    return [min(1.0, part / width) for part in covered]


def _draw_spans(axes: Any, arm: _Arm) -> None:
    middle = arm.gpu[len(arm.gpu) // 2][0]
    for row, (label, spans, colour) in enumerate((("GPU", arm.gpu, GPU), ("host", arm.host, HOST))):
        first = max(0, bisect_left(spans, (middle, 0.0)) - 1)
        shown = [(begin - middle, length) for begin, length in spans[first:] if begin < middle + ZOOM_MS]
        axes.broken_barh(shown, (row + 0.12, 0.66), facecolors=colour, edgecolor="white", linewidth=0.4)
        axes.text(-0.008, row + 0.45, label, transform=axes.get_yaxis_transform(), ha="right", va="center")
    axes.set(xlim=(0, ZOOM_MS), ylim=(0, 2), yticks=[])
    axes.set_title(f"{arm.name}, the middle of the stage", loc="left", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("spans", type=Path)
    drawing = commands.add_parser("draw")
    drawing.add_argument("spans", type=Path)
    drawing.add_argument("png", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        from cuda_command import require_cuda  # imports torch, which `draw` does without

        require_cuda(recording)
        record(arguments.spans)
    else:
        draw(arguments.spans, arguments.png)


if __name__ == "__main__":
    main()
