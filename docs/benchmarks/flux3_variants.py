"""Whole FLUX 3 Action requests of several variants on one CUDA device, beside their products alone.

    python docs/benchmarks/flux3_variants.py OUT_FOLDER

Synthetic weights at full size, DROID shapes, the captions encoded before, the VAE included. Arms are timed in
turn, forwards and backwards (A B B A), in one process, and every stage output is compared with eager's, down
to the bit. `products` are the matrix products, convolutions and attention of eager's request as one graph.
Writes flux3_variants.json and flux3_variants.md.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from products_alone import products_alone

from accel.fusion.compare import first_mismatch
from accel.graphs.tree import distinct_tensors
from accel.measure.timing import median
from pipelines.build import build
from pipelines.flux3_action.observation import parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame
from pipelines.pipeline import Pipeline
from tasks.arms import policy_named
from tasks.config import ROOT, compose
from tasks.environment import device_facts, software
from tasks.markdown_table import markdown_table

RECIPES = ("base", "sd")
ARMS = ("eager", "graph", "fused", "graph+fused")
WARM_UPS, ROUNDS, FRAMES = 3, 24, 4


def main(out: Path) -> None:
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "software": software(),
        "device": device_facts("cuda:0"),
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
    eager = build(compose(f"model.variant={variant}", "size=full", "device=cuda:0", "accel=eager"))
    arms = {name: eager.with_policy(policy_named(name)) if name != "eager" else eager for name in ARMS}
    requests = [_request(eager, frame) for frame in range(FRAMES)]
    expected = [eager.run(request).outputs for request in requests]
    differing = {
        name: [
            f"frame {frame}, {output}: {mismatch}"
            for frame, request in enumerate(requests)
            for output, value in arm.run(request).outputs.items()
            if (mismatch := _mismatch(expected[frame][output], value))
        ]
        for name, arm in arms.items()
    }
    calls: dict[str, Callable[[int], Any]] = {
        name: lambda turn, arm=arm: arm.run(requests[turn % FRAMES]) for name, arm in arms.items()
    }
    products = _captured(eager, requests[0])
    calls["products"] = lambda turn: products()
    walls = _in_turn(calls)
    violations = arms["graph+fused"].strict_violations()
    for arm in arms.values():
        arm.close()
    return {
        "ms": {name: median(each) for name, each in walls.items()},
        "differing": differing,
        "violations": violations,
    }


def _request(pipeline: Pipeline[Any, Any], frame: int) -> Any:
    raw = {**load_episode_frame(ROOT / "data" / "panda_lift", 5 * frame), "prompt": "lift the red cube"}
    config: Any = pipeline
    return config.request(parse_observation(raw, config.config), seed=frame)


def _mismatch(expected: Any, value: Any) -> str:
    return str(first_mismatch(distinct_tensors(expected), distinct_tensors(value)) or "")


def _captured(pipeline: Pipeline[Any, Any], request: Any) -> Callable[[], None]:
    modules = [module for stage in pipeline.stages for module in stage.modules().values()]
    weights = [weight for module in modules for weight in module.parameters()]
    with torch.inference_mode():
        products = products_alone(lambda: pipeline.run(request), weights)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            products()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            products()
    return graph.replay


def _in_turn(calls: dict[str, Callable[[int], Any]]) -> dict[str, list[float]]:
    """Wall times in ms of ROUNDS calls each."""
    walls: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-WARM_UPS, ROUNDS):
        for name in calls if turn % 2 == 0 else reversed(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            calls[name](turn)
            torch.cuda.synchronize()
            if turn >= 0:
                walls[name].append((time.perf_counter() - begin) * 1e3)
    return walls


def markdown(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["software"].items())
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
        f"{report['date']}, {report['device']['name']}; {versions}.",
        "Command: `python docs/benchmarks/flux3_variants.py OUT_FOLDER`. Synthetic weights, DROID shapes,",
        f"captions encoded before, VAE included; medians of {ROUNDS} requests, arms in turn in one process.",
        "Products: the matrix products, convolutions and attention of the request as one graph. Base: "
        "4 steps, two passes; sd: 1 step, one pass.",
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
    return "\n".join([*lines, *markdown_table(heads, rows, text_columns=1)]) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
