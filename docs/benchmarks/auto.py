"""What `accel=auto` chooses, beside every fixed policy, on one CUDA device.

    python docs/benchmarks/auto.py OUT_FOLDER [--only WORK ...] [--size tiny]

Synthetic weights, one process, one pipeline for each policy on the same weights, prompts encoded anew. After
the choice all take turns, in another order every round; outputs are compared with eager's, down to the bit.
Writes auto.json and auto.md after every work.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from provenance import provenance, stamp
from timing import in_turn

from accel.measure.timing import median
from pipelines.auto_policy import choose
from pipelines.build import build, choose_device
from tasks.arms import policy_named
from tasks.auto_choice import choices_in_words
from tasks.config import compose
from tasks.heap import keep_freed_memory
from tasks.markdown_table import markdown_table

FIXED = ("eager", "graph", "segmented", "fused", "graph+fused")
AUTO = "auto"


@dataclass(frozen=True)
class Work:
    """overrides: of model and request. rounds: timed ones. fixed: policies beside `auto`."""

    overrides: tuple[str, ...]
    rounds: int
    fixed: tuple[str, ...] = FIXED


KLEIN = ("model=flux2_klein", "model.variant=4b", "model.prompt_cache_tokens=0")
LTX2 = ("model=ltx2", "model.steps=2", "model.prompt_cache_tokens=0")
LARGE = ("model.frames=121", "model.height=512", "model.width=768")
WORKS = {
    "FLUX 3 Action": Work(("model=flux3_action", "model.caption_cache_tokens=0"), rounds=8),
    "FLUX.2 klein 4B, 512x512": Work((*KLEIN, "model.height=512", "model.width=512"), rounds=12),
    "FLUX.2 klein 4B, 1024x1024": Work((*KLEIN, "model.height=1024", "model.width=1024"), rounds=8),
    "LTX-2.0, 25 frames 384x256": Work(
        (*LTX2, "model.frames=25", "model.height=256", "model.width=384"), rounds=6
    ),
    # The two fastest alone: the graphs of all would not fit beside one another.
    "LTX-2.0, 121 frames 768x512": Work((*LTX2, *LARGE), rounds=4, fixed=("eager", "fused", "graph+fused")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(WORKS), choices=list(WORKS), metavar="WORK")
    allowed = compose("accel=auto").accel.auto_seconds
    parser.add_argument("--seconds", type=float, default=allowed, help="accel.auto_seconds of each choice")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    options = parser.parse_args()
    device = choose_device("auto")
    keep_freed_memory()  # as every task does
    report: dict[str, Any] = {**provenance(device), "works": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        row = report["works"][name] = _measure(WORKS[name], options.size, options.seconds)
        print(name, json.dumps(row), flush=True)
        (options.out / "auto.json").write_text(json.dumps(report, indent=1))
        (options.out / "auto.md").write_text(markdown(report))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(work: Work, size: str, seconds: float) -> dict[str, Any]:
    config = compose(*work.overrides, f"size={size}", "accel=eager")
    bounds = compose(*work.overrides, f"size={size}", "accel=auto", f"accel.auto_seconds={seconds}").accel
    with ExitStack() as opened:
        eager = opened.enter_context(closing(build(config)))
        request = eager.request_from(config)
        choice = choose(eager, request, bounds)
        policies = {name: policy_named(name) for name in work.fixed if name != "eager"}
        policies[AUTO] = choice.policy
        arms = {"eager": eager} | {
            name: opened.enter_context(closing(eager.with_policy(policy)))
            for name, policy in policies.items()
        }
        digests = {name: [arm.run(request).digests for _ in range(2)] for name, arm in arms.items()}
        walls = in_turn(
            {name: lambda arm=arm: arm.run(request) for name, arm in arms.items()},  # type: ignore[misc]
            rounds=work.rounds,
            warm_ups=1,
        )
    expected = digests["eager"][0]
    return {
        "ms": {name: median(each) for name, each in walls.items()},
        "unequal": [name for name, each in digests.items() if any(other != expected for other in each)],
        "choices": choices_in_words(choice),
        "not_tried": {str(candidate): why for candidate, why in choice.not_tried.items()},
        "choosing_s": choice.seconds,
        "seconds": seconds,
    }


def markdown(report: Mapping[str, Any]) -> str:
    heads = ("Work", *FIXED, AUTO, "best fixed", "auto to it", "choosing s", "auto_seconds", "equal bits")
    rows = []
    for name, row in report["works"].items():
        ms = row["ms"]
        best = min((arm for arm in FIXED if arm in ms), key=ms.__getitem__)
        rows.append(
            [
                name,
                *(f"{ms[arm]:.1f}" if arm in ms else "-" for arm in (*FIXED, AUTO)),
                best,
                f"{ms[AUTO] / ms[best]:.3f}",
                f"{row['choosing_s']:.0f}",
                f"{row['seconds']:g}",
                f"NO: {', '.join(row['unequal'])}" if row["unequal"] else "yes",
            ]
        )
    choices = [
        [name, stage, choice["choice"], choice["reason"]]
        for name, row in report["works"].items()
        for stage, choice in row["choices"].items()
    ]
    lines = [
        "# accel=auto beside the fixed policies",
        "",
        stamp(report),
        "Command: `python docs/benchmarks/auto.py OUT_FOLDER`. ms of whole requests that encode their",
        "prompts anew, medians, all policies in turn in one process; LTX-2.0 with 2 denoising steps.",
        "",
        *markdown_table(heads, rows, text_columns=1),
        "",
        "## What was chosen",
        "",
        *markdown_table(("Work", "stage", "choice", "reason"), choices, text_columns=4),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
