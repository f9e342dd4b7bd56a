"""Regions of FLUX 3 Action under the runner against graphs of the same calls that are written by hand.

    python docs/benchmarks/region_overhead.py OUT_FOLDER

Full size, synthetic bf16 weights, DROID shapes. A call copies the arguments in, replays, and copies the
results out; its wall time is taken with the device idle before and after, in turn (A B B A), in one process.
Under the runner every call has its signature, modules and process switches checked as well.
Writes region_overhead.json and region_overhead.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cuda_command import out_folder
from provenance import provenance, stamp
from timing import captured

from accel.graphs.buffers import clone_layout
from accel.graphs.tree import distinct_tensors, map_tensors
from accel.loops import BoundLoop, OnStep, iterate
from accel.measure.timing import percentile
from accel.region import loop_bodies_of, regions_of
from pipelines.build import build
from pipelines.pipeline import Pipeline
from tasks.config import compose
from tasks.markdown_table import markdown_table

WARM_UPS, ROUNDS, SECONDS = 20, 400, 8.0
Call = Callable[[], Any]


@dataclass
class Noted(BoundLoop):
    """In the place of a stage's region or loop: passes calls on and keeps the last one's arguments."""

    inner: Any
    args: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> Any:
        self.args = args
        return self.inner(*args)

    def iterate(
        self, carry: Any, steps: Sequence[Any], shared: Any, on_step: OnStep, constants: Mapping[str, Any]
    ) -> Any:
        self.args = carry, tuple(steps), shared, on_step, dict(constants)
        return self.inner.iterate(*self.args)


@dataclass(frozen=True)
class Called:
    """A region or a whole loop as a request called it. plain: without the runner, of the same arguments."""

    name: str
    plain: Callable[..., Any]
    ours: Callable[..., Any]
    args: tuple[Any, ...]


def main() -> None:
    out = out_folder(__doc__)
    config = compose("size=full", "device=cuda:0", "accel=graph", "model.caption_cache_tokens=0")
    pipeline = build(config)
    request = pipeline.request_from(config)
    rows = {}
    for each in _called(pipeline, request):
        with torch.inference_mode():
            by_hand = _graph_by_hand(each.plain, each.args)
            rows[each.name] = _in_turn(lambda each=each: each.ours(*each.args), by_hand)
        print(each.name, rows[each.name], flush=True)
    report = {
        **provenance("cuda:0"),
        "regions": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "region_overhead.json").write_text(json.dumps(report, indent=1))
    (out / "region_overhead.md").write_text(markdown(report))


def _called(pipeline: Pipeline[Any, Any], request: Any) -> Iterator[Called]:
    """Everything that the first request of a pipeline runs as graphs."""
    for stage in pipeline.stages:
        loops = {body.name: body.method for body in loop_bodies_of(stage)}
        for name, method in {**dict(regions_of(stage)), **loops}.items():
            ours = getattr(stage, name)
            noted = Noted(ours)
            setattr(stage, name, noted)
            pipeline.run(request)
            setattr(stage, name, ours)
            plain = partial(_plain_loop, method) if name in loops else method
            yield Called(f"{stage.name}.{name}", plain, ours.iterate if name in loops else ours, noted.args)


def _plain_loop(
    body: Callable[..., Any], carry: Any, steps: Any, shared: Any, on_step: OnStep, constants: Any
) -> Any:
    return iterate(body, carry, steps, shared, on_step=on_step, **constants)


def _graph_by_hand(fn: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    given = distinct_tensors(args)
    buffers = [clone_layout(tensor) for tensor in given]
    fixed = dict(zip(map(id, given), buffers, strict=True))
    static = map_tensors(args, lambda tensor: fixed[id(tensor)])
    graph = captured(lambda: fn(*static))
    outputs = distinct_tensors(graph.value)

    def run() -> list[Tensor]:
        for buffer, argument in zip(buffers, given, strict=True):
            buffer.copy_(argument)
        graph.replay()
        return [output.clone() for output in outputs]

    return run


def _in_turn(ours: Call, by_hand: Call) -> dict[str, float]:
    """Percentiles of wall times in us; of about `SECONDS`, at most `ROUNDS` calls each."""
    walls: dict[str, list[float]] = {"ours": [], "by_hand": []}
    calls = {"ours": ours, "by_hand": by_hand}
    until = time.perf_counter() + SECONDS
    for turn in range(ROUNDS + WARM_UPS):
        for name in calls if turn % 2 == 0 else reversed(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            calls[name]()
            torch.cuda.synchronize()
            walls[name].append((time.perf_counter() - begin) * 1e6)
        if time.perf_counter() > until:
            break
    kept = {name: each[min(WARM_UPS, len(each) // 4) :] for name, each in walls.items()}
    return {f"{name}_p{p}": percentile(each, p) for name, each in kept.items() for p in (50, 99)}


def markdown(report: dict[str, Any]) -> str:
    heads = ("Region", "ours p50 us", "by hand p50 us", "ratio", "more us", "ours p99 us", "by hand p99 us")
    rows = [
        [
            name,
            *(f"{row[f'{arm}_p50']:,.0f}" for arm in ("ours", "by_hand")),
            f"{row['ours_p50'] / row['by_hand_p50']:.3f}",
            f"{row['ours_p50'] - row['by_hand_p50']:.0f}",
            *(f"{row[f'{arm}_p99']:,.0f}" for arm in ("ours", "by_hand")),
        ]
        for name, row in report["regions"].items()
    ]
    lines = [
        "# Regions against graphs written by hand",
        "",
        stamp(report),
        "Command: `python docs/benchmarks/region_overhead.py OUT_FOLDER`. FLUX 3 Action at full size,",
        "synthetic bf16 weights, DROID shapes. Copy in, replay, copy out and wait, the device idle before;",
        "in turn (A B B A) in one process.",
        "",
        *markdown_table(heads, rows, text_columns=1),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
