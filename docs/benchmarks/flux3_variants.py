"""Whole FLUX 3 Action requests of several variants on one CUDA device, beside their products alone.

    python docs/benchmarks/flux3_variants.py OUT_FOLDER

Synthetic weights at full size, DROID shapes, the captions encoded before, the VAE included. Arms are timed in
turn, in another order every round, in one process, and every stage output is compared with eager's, down
to the bit. `products` are the matrix products, convolutions and attention of eager's request as one graph.
Savings, which move roundings, are arms of the base variant; how far they move the actions is told.
Writes flux3_variants.json and flux3_variants.md.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cuda_command import out_folder
from policies import policy_of
from products_alone import products_alone
from provenance import provenance, stamp
from timing import captured, in_turn

from accel.fusion.compare import first_mismatch
from accel.graphs.tree import distinct_tensors
from accel.measure.timing import median
from pipelines.build import build
from pipelines.flux3_action.observation import parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame
from pipelines.pipeline import Pipeline
from tasks.config import ROOT, compose
from tasks.heap import keep_freed_memory
from tasks.markdown_table import markdown_table

RECIPES = ("base", "sd")
ARMS = ("eager", "graph+fused")
SAVINGS = ("graph+fused, skip_unused_guidance", "graph+fused, batched_guidance")
WARM_UPS, ROUNDS, FRAMES = 3, 12, 4


def main() -> None:
    out = out_folder(__doc__)
    keep_freed_memory()  # as every task does
    report: dict[str, Any] = {
        **provenance("cuda:0"),
        "variants": {},
    }
    out.mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        for variant in (recipe, "fp8r" if recipe == "base" else f"{recipe}-fp8r"):
            row = report["variants"][variant] = _measure(variant)
            print(variant, json.dumps(row), flush=True)
            (out / "flux3_variants.json").write_text(json.dumps(report, indent=1))
            (out / "flux3_variants.md").write_text(markdown(report))
            gc.collect()
            torch.cuda.empty_cache()
    print(markdown(report))


def _measure(variant: str) -> dict[str, Any]:
    started = time.perf_counter()
    eager = build(compose(f"model.variant={variant}", "size=full", "device=cuda:0", "accel=eager"))
    print(f"{variant}: loaded in {time.perf_counter() - started:.1f} s", flush=True)
    names = [*ARMS, *(SAVINGS if variant == "base" else ())]
    arms = {name: eager if name == "eager" else eager.with_policy(policy_of(name)) for name in names}
    requests = [_request(eager, frame) for frame in range(FRAMES)]
    expected = [eager.run(request) for request in requests]
    results = {name: [arm.run(request) for request in requests] for name, arm in arms.items()}
    calls = {name: _serving(arm, requests) for name, arm in arms.items()}
    calls["products"] = _products(eager, requests[0])
    print(f"{variant}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    walls = in_turn(calls, rounds=ROUNDS, warm_ups=WARM_UPS)
    violations = arms["graph+fused"].strict_violations()
    for arm in arms.values():
        arm.close()
    return {
        "ms": {name: median(each) for name, each in walls.items()},
        "differing": {name: _differing(expected, results[name]) for name in ARMS},
        "moved_by": {name: _moved(expected, results[name]) for name in names if name not in ARMS},
        "violations": violations,
    }


def _serving(arm: Pipeline[Any, Any], requests: Sequence[Any]) -> Callable[[], Any]:
    """A call for each request in turn, over and over."""
    frames = cycle(requests)
    return lambda: arm.run(next(frames))


def _differing(expected: Sequence[Any], results: Sequence[Any]) -> list[str]:
    """Stage outputs that are not equal, with their first element that is not."""
    return [
        f"frame {frame}, {name}: {mismatch}"
        for frame, (theirs, ours) in enumerate(zip(expected, results, strict=True))
        for name, value in ours.outputs.items()
        if (mismatch := first_mismatch(distinct_tensors(theirs.outputs[name]), distinct_tensors(value)))
    ]


def _moved(expected: Sequence[Any], results: Sequence[Any]) -> float:
    """The largest difference of an action, as a share of the largest action."""
    pairs = [(theirs.actions, ours.actions) for theirs, ours in zip(expected, results, strict=True)]
    return max(float(abs(ours - theirs).max() / abs(theirs).max()) for theirs, ours in pairs)


def _request(pipeline: Pipeline[Any, Any], frame: int) -> Any:
    raw = {**load_episode_frame(ROOT / "data" / "panda_lift", 5 * frame), "prompt": "lift the red cube"}
    config: Any = pipeline
    return config.request(parse_observation(raw, config.config), seed=frame)


def _products(pipeline: Pipeline[Any, Any], request: Any) -> Callable[[], None]:
    modules = [module for stage in pipeline.stages for module in stage.modules().values()]
    weights = [weight for module in modules for weight in module.parameters()]
    with torch.inference_mode():
        return captured(products_alone(lambda: pipeline.run(request), weights)).replay


def markdown(report: dict[str, Any]) -> str:
    heads = (
        "Variant",
        *(f"{arm} ms" for arm in ARMS),
        "products ms",
        "speed-up",
        "to products",
        "equal bits",
    )
    lines = [
        "# FLUX 3 Action requests of several variants",
        "",
        stamp(report),
        "Command: `python docs/benchmarks/flux3_variants.py OUT_FOLDER`. Synthetic weights, DROID shapes,",
        f"captions encoded before, VAE included; medians of {ROUNDS} requests, arms in turn in one process.",
        "Products: the matrix products, convolutions and attention of the request as one graph.",
        "Base: 4 steps, two passes; sd: 1 step, one pass.",
        "",
    ]
    rows = []
    for variant, row in report["variants"].items():
        ms, differing = row["ms"], [line for lines in row["differing"].values() for line in lines]
        rows.append(
            [
                variant,
                *(f"{ms[arm]:.1f}" for arm in (*ARMS, "products")),
                f"{ms['eager'] / ms['graph+fused']:.2f}",
                f"{ms['graph+fused'] / ms['products']:.2f}",
                f"NO: {differing[0]}" if differing else "yes",
            ]
        )
    lines += markdown_table(heads, rows, text_columns=1)
    saved = [
        [
            variant,
            arm,
            f"{row['ms'][arm]:.1f}",
            f"{row['ms']['graph+fused'] / row['ms'][arm]:.3f}",
            f"{share:.1e}",
        ]
        for variant, row in report["variants"].items()
        for arm, share in row["moved_by"].items()
    ]
    heads = ("Variant", "arm", "ms", "to graph+fused", "moves actions by (share of the largest)")
    lines += ["", "Savings, off by default:", "", *markdown_table(heads, saved, text_columns=2)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
