"""Whole requests of FLUX.2 and LTX-2 at full size: are the bits equal, and what does each policy gain?

    python docs/benchmarks/generation.py OUT_FOLDER [--only WORK ...] [--arms ARM ...] [--minutes 8]

Synthetic weights (bf16 on CUDA), one process. An arm is a pipeline of its own on the weights of eager's,
closed before the next is made. For each timed request the two take turns (A B B A), both encode its prompts
anew, and all stage outputs are compared, down to the bit, with what eager gave for that request first;
outputs that eager itself does not repeat are told apart. At last one request runs under the profiler.

What fails becomes a row with its error, and so does what would begin too late. generation.json and
generation.md are written after every arm. Arms that the folder's generation.json has are kept if software,
device, size and the steps of LTX-2 are the same, so that several calls can share the work. Code that Triton
or Inductor find on disk shortens first results.
`--size tiny --device cpu` tries all of this with small requests under the same names.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from generation_tables import REQUEST, markdown
from generation_works import Work, works
from policies import policy_of
from provenance import provenance

from accel.errors import SamebitError
from accel.fusion.compare import first_mismatch
from accel.graphs.containment import describe as describe_fault
from accel.graphs.tree import distinct_tensors
from accel.policy import AccelPolicy
from pipelines.build import build, choose_device
from tasks.arms import Arm
from tasks.config import compose

Outputs: TypeAlias = Mapping[str, Any]


class Report:
    """What was measured, on disk after every addition, and the time that is left for more."""

    def __init__(self, out: Path, *, minutes: float, facts: Mapping[str, Any]) -> None:
        """facts: the date, and what figures depend on; works of an earlier report of the same are kept."""
        self._started = time.perf_counter()
        self._minutes = minutes
        self._out = out
        written = out / "generation.json"
        earlier = json.loads(written.read_text()) if written.exists() else {}
        same = all(earlier.get(name) == value for name, value in facts.items() if name != "date")
        self._works: dict[str, dict[str, Any]] = earlier["works"] if same else {}
        self._facts = facts

    def begin(self, name: str, work: Work) -> None:
        """Arms that are not to be measured anew are kept, and with them the facts that their rows tell.

        Those of another note are not: it tells how the request departs from the usual one.
        """
        known = self._works.get(name, {})
        same = known.get("note") == work.note
        earlier = {fact: value for fact, value in known.items() if same and fact != "error"}
        arms = {arm: row for arm, row in earlier.get("arms", {}).items() if arm not in work.arms}
        self._works[name] = {**earlier, "note": work.note, "arms": arms}

    def add(self, name: str, **found: Any) -> None:
        """Facts of a work."""
        self._works[name] |= found
        self._write()

    def add_arm(self, name: str, arm: str, row: Mapping[str, Any]) -> None:
        """What is known of an arm, beside or in place of what was."""
        arms = self._works[name]["arms"]
        arms[arm] = {**arms.get(arm, {}), **row}
        self._write()

    def require_time(self) -> None:
        """Raises: SamebitError after the minutes that were given."""
        if time.perf_counter() - self._started > 60 * self._minutes:
            raise SamebitError(f"not measured: {self._minutes:g} minutes were over")

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._started:6.1f} s] {text}", flush=True)

    def _write(self) -> None:
        report = {**self._facts, "works": self._works}
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / "generation.json").write_text(json.dumps(report, indent=1))
        (self._out / "generation.md").write_text(markdown(report))


class MeasuredArm:
    """A pipeline, the times of its requests, and the outputs in which it departs from what was expected.

    times: ms of every request in order, the cold one first: of all of it (`REQUEST`) and of its stages.
    unequal: by name of the output, the largest difference as a share of the largest expected value.
    """

    def __init__(self, pipeline: Arm) -> None:
        self.pipeline = pipeline
        self.times: list[dict[str, Any]] = []
        self.unequal: dict[str, float] = {}

    def run(self, request: Any) -> Outputs:
        begin = time.perf_counter()
        outputs: Outputs = self.pipeline.run(request).outputs
        wall = (time.perf_counter() - begin) * 1e3
        stages = self.pipeline.record.stages.values()
        last = {stage.name: stage.latest_ms for stage in stages}
        self.times.append({REQUEST: wall, **last})
        return outputs

    def compare(self, request: Any, expected: Outputs) -> None:
        """Run it and note what differs."""
        for name, value in self.run(request).items():
            difference = _difference(value, expected[name])
            if difference is not None:
                self.unequal[name] = max(difference, self.unequal.get(name, 0.0))

    def row(self, *, timed: int) -> dict[str, Any]:
        """What is known so far, JSON-ready. timed: how many of the last requests count."""
        record = self.pipeline.record
        stages = [record.stage(stage.name).to_dict() for stage in self.pipeline.stages]
        return {
            "times": self.times[-timed:],
            "unequal": self.unequal,
            "violations": self.pipeline.strict_violations(),
            "stages": [{k: v for k, v in stage.items() if k != "walls_ms"} for stage in stages],
        }


def main() -> None:
    known = works(size="full", ltx_steps=2)
    arms = sorted({arm for work in known.values() for arm in work.arms})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(known), choices=list(known), metavar="WORK")
    parser.add_argument("--arms", nargs="*", default=arms, choices=arms, metavar="ARM", help="beside eager")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing new later than this")
    parser.add_argument("--ltx-steps", type=int, default=2, help="denoising steps of LTX-2, 2 or more")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = str(choose_device(options.device))
    facts = {**provenance(device), "size": options.size}
    report = Report(options.out, minutes=options.minutes, facts=facts)
    chosen = {
        name: replace(work, arms=tuple(arm for arm in work.arms if arm in options.arms))
        for name, work in works(size=options.size, ltx_steps=options.ltx_steps).items()
        if name in options.only
    }
    place = f"size={options.size}", f"device={device}", "model.prompt_cache_tokens=0", "accel=eager"
    for model, group in groupby(chosen.items(), key=lambda item: item[1].model):
        _measure_model(model, dict(group), place, report)
        _free_memory()


def _measure_model(
    model: Sequence[str], group: Mapping[str, Work], place: Sequence[str], report: Report
) -> None:
    """Load the components and measure every work on them."""
    for name, work in group.items():
        report.begin(name, work)
    try:
        report.require_time()
        report.say(f"{', '.join(model)}: loading")
        pipeline = build(compose(*model, *place))
    except Exception as error:
        report.say(describe(error))
        for name in group:
            report.add(name, error=describe(error))
        return
    for name, work in group.items():
        try:
            _measure(name, work, pipeline, place, report)
        except Exception as error:
            report.say(describe(error))
            report.add(name, error=describe(error))
        _free_memory()


def _measure(name: str, work: Work, pipeline: Arm, place: Sequence[str], report: Report) -> None:
    """Eager, then each arm beside it, then eager under the profiler."""
    report.require_time()
    report.say(f"{name}: eager")
    requests, profiled = work.requests(pipeline, *place), work.profiled(pipeline, *place)
    pipeline.new_record()
    eager = MeasuredArm(pipeline)
    expected = [eager.run(request) for request in requests]
    report.add(name, outputs=_tensor_outputs(expected[0]), not_finite=_not_finite(expected))

    def add_eager() -> None:
        """Of its requests all but the cold one count."""
        first_s = eager.times[0][REQUEST] / 1e3
        report.add_arm(name, "eager", eager.row(timed=len(eager.times) - 1) | {"first_s": first_s})

    add_eager()
    for policy in work.arms:
        try:
            report.require_time()
            report.say(f"{name}: {policy}")
            accel = policy_of(policy, *work.model)
            for row in _measure_arm(accel, eager, list(zip(requests, expected, strict=True)), profiled):
                report.add_arm(name, policy, row)
        except Exception as error:
            report.say(describe(error))
            report.add_arm(name, policy, {"error": describe(error)})
        add_eager()
        _free_memory()
    report.require_time()
    report.say(f"{name}: eager, profiled")
    pipeline.profile(profiled)
    add_eager()


def _measure_arm(
    accel: AccelPolicy, eager: MeasuredArm, requests: Sequence[tuple[Any, Outputs]], profiled: Any
) -> Iterator[dict[str, Any]]:
    """Cold, warm, timed in turn with eager: the arm's row; profiled: the whole row.

    requests: with the outputs that are expected. profiled: runs before as well, so that its tables are there.
    """
    begin = time.perf_counter()
    with closing(eager.pipeline.with_policy(accel)) as pipeline:
        made_s = time.perf_counter() - begin
        arm = MeasuredArm(pipeline)
        arm.compare(*requests[0])
        for each in (eager, arm):
            each.pipeline.run(profiled)
        for turn, request in enumerate(requests):
            for each in (eager, arm) if turn % 2 == 0 else (arm, eager):
                each.compare(*request)
        first_s = made_s + arm.times[0][REQUEST] / 1e3
        timed = len(requests)
        yield {**arm.row(timed=timed), "eager_times": eager.times[-timed:], "first_s": first_s}
        pipeline.profile(profiled)
        yield arm.row(timed=timed)


def describe(error: Exception) -> str:
    """Our own errors say all themselves."""
    return str(error) if isinstance(error, SamebitError) else describe_fault(error)


def _difference(value: Any, expected: Any) -> float | None:
    """The largest, as a share of the largest expected value; `None` where all is equal down to the bit."""
    ours, theirs = distinct_tensors(value), distinct_tensors(expected)
    if first_mismatch(theirs, ours) is None:
        return None
    shares = [
        (mine.float() - other.float()).abs().max() / other.float().abs().max()
        for mine, other in zip(ours, theirs, strict=True)
        if other.numel()
    ]
    return max(map(float, shares))


def _tensor_outputs(outputs: Outputs) -> int:
    """How many of them hold tensors."""
    return sum(bool(distinct_tensors(value)) for value in outputs.values())


def _not_finite(results: Sequence[Outputs]) -> list[str]:
    """Outputs with an infinity or a NaN: that those are equal says little."""
    names = {
        name
        for outputs in results
        for name, value in outputs.items()
        if not all(tensor.isfinite().all() for tensor in distinct_tensors(value))
    }
    return sorted(names)


def _free_memory() -> None:
    """Closed pipelines hold cycles; graphs need what they leave in one piece."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
