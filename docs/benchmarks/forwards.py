"""One transformer forward of each model at full size on one CUDA device: plain, captured, compiled, fused.

    python docs/benchmarks/forwards.py OUT_FOLDER [--only WORK ...] [--without-compile]

Synthetic bf16 weights, batch 1, a process for each work. `eager` is the library's own module (for FLUX 3
Action our plain one) called as its pipeline calls it. `fused` hoists what steps share and runs the fused
kernels; graph arms are regions under the runner. Every arm is compared with eager, bit for bit. Arms are
timed in turn, in another order every round, the wall clock of one call with the device idle before; what is
compiled but not captured comes first and takes turns with eager alone. `matmul + attention` are the
products of the fused forward as a graph of their own. Writes forwards.json and forwards.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cuda_command import require_cuda
from forwards_tables import markdown
from forwards_works import WORKS, Work
from products_alone import products_alone
from provenance import provenance
from timing import captured, in_turn

from accel.fusion.mounting import Mount, mount
from accel.graphs.tree import distinct_tensors
from accel.measure.activity import observe
from accel.measure.profile import profile_call
from accel.measure.timing import percentile
from accel.measure.traffic import fused_kernel_names
from accel.region import region
from accel.runner import Runner
from stages.stage import Field, Stage, State
from tasks.config import compose
from tasks.kernel_categories import category_of

ARMS = {"graph": "accel=graph", "fused": "accel=fused", "graph+fused": "accel=graph+fused"}
WARM_UPS, CALLS, ROW = 5, 24, 10
REPORT = "forwards.json"
Call = Callable[[], Any]


class Forward(Stage):
    """One forward as a stage with one region."""

    name: ClassVar[str] = "denoising"
    reads: ClassVar[tuple[Field, ...]] = ()
    writes: ClassVar[tuple[Field, ...]] = ()

    def __init__(self, work: Work, fn: Callable[..., Any]) -> None:
        self._work = work
        self._fn = fn

    def modules(self) -> Mapping[str, nn.Module]:
        return {"transformer": self._work.transformer}

    def mounts(self, allowed: frozenset[str]) -> Sequence[Mount]:
        return mount(self._work.transformer, self._work.forwards, allowed=allowed)

    def run(self, state: State) -> None:
        raise NotImplementedError

    @region
    def forward(self, *inputs: Any) -> Any:
        return self._fn(*inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--without-compile", action="store_true")
    options = parser.parse_args()
    require_cuda(parser)
    options.out.mkdir(parents=True, exist_ok=True)
    if len(options.only) > 1:
        _in_processes(options.out, options.only, flags=["--without-compile"] * options.without_compile)
        return
    device = torch.device("cuda", 0)
    for name in options.only:
        with torch.inference_mode():
            row = _measure(WORKS[name](device), device, compiled=not options.without_compile)
        print(name, json.dumps({k: v for k, v in row.items() if k != "kernels"}), flush=True)
        _add(options.out, name, row, device)


def _in_processes(out: Path, names: Sequence[str], *, flags: Sequence[str]) -> None:
    """A process for each work: what compilation leaves behind in one, such as a fault, ends with it."""
    (out / REPORT).unlink(missing_ok=True)
    for name in names:
        command = [sys.executable, __file__, str(out), "--only", name, *flags]
        code = subprocess.run(command, check=False).returncode
        if code:
            print(f"{name}: no result, exit code {code}", flush=True)


def _add(out: Path, name: str, row: Mapping[str, Any], device: torch.device) -> None:
    """Write the report anew, with one work more or in the place of an earlier one."""
    file = out / REPORT
    earlier = json.loads(file.read_text())["works"] if file.exists() else {}
    report = {
        **provenance(device),
        "works": {**earlier, name: row},
    }
    file.write_text(json.dumps(report, indent=1))
    (out / "forwards.md").write_text(markdown(report))


def _measure(work: Work, device: torch.device, *, compiled: bool) -> dict[str, Any]:
    expected = distinct_tensors(work.stock(*work.inputs))
    row: dict[str, Any] = {"tokens": work.tokens, "compile_scope": work.compile_scope, "arms": {"eager": {}}}
    arms: dict[str, Call] = {"eager": lambda: work.stock(*work.inputs)}
    if compiled:
        row["compiled"], arms["compile + graph"] = _compiled(work, arms["eager"], expected)
        row["arms"]["compile + graph"] = {}
    runners = {}
    for name, policy in ARMS.items():
        stage = Forward(work, work.stock if name == "graph" else work.ours)
        inputs = work.inputs if name == "graph" else work.our_inputs
        begin = time.perf_counter()
        runners[name] = Runner(compose(policy).accel, device=device)
        runners[name].bind(stage)
        arms[name] = lambda stage=stage, inputs=inputs: stage.forward(*inputs)
        value = distinct_tensors(arms[name]())
        torch.cuda.synchronize()
        row["arms"][name] = {"cold_s": time.perf_counter() - begin, "equal": _equal(value, expected)}
        value = distinct_tensors(arms[name]())
        row["arms"][name]["replay_equal"] = _equal(value, expected)
    floor = products_alone(lambda: work.ours(*work.our_inputs), work.transformer.parameters())
    arms["matmul + attention"] = captured(floor).replay
    row["arms"]["matmul + attention"] = {}
    for name, walls in in_turn(arms, rounds=CALLS, warm_ups=WARM_UPS).items():
        row["arms"][name]["ms"] = statistics.median(walls)
        row["arms"][name]["p95_ms"] = percentile(walls, 95)
        row["arms"][name]["sustained_ms"] = _sustained(arms[name])
    for name, runner in runners.items():
        activity = profile_call(arms[name], device=device)
        assert activity is not None
        record = runner.record.stage("denoising")
        row["arms"][name] |= activity._asdict() | {
            "extra_mib": record.extra_bytes / 2**20,
            "record": record.to_dict(),
            "violations": runner.strict_violations(),
        }
    row["kernels"] = {name: _by_category(arms[name], device) for name in ("eager", "graph+fused")}
    for runner in runners.values():
        runner.close()
    torch._dynamo.reset()
    return row


def _compiled(work: Work, eager: Call, expected: list[Tensor]) -> tuple[dict[str, Any], Call]:
    """The compiled forward beside eager, and as a graph that stays when its blocks are plain again."""
    begin = time.perf_counter()
    compiled = work.compile()
    call: Call = lambda: compiled(*work.inputs)  # noqa: E731
    value = distinct_tensors(call())
    torch.cuda.synchronize()
    cold = time.perf_counter() - begin
    graph = captured(call).replay
    walls = in_turn({"eager": eager, "compile": call}, rounds=CALLS, warm_ups=WARM_UPS)
    for module in work.transformer.modules():
        module._compiled_call_impl = None  # blocks compiled in place
    pairs = zip(value, expected, strict=True)
    difference = max(float((ours.float() - theirs.float()).abs().max()) for ours, theirs in pairs)
    row = {
        "cold_s": cold,
        "equal": _equal(value, expected),
        "max_difference": difference,
        "relative_difference": difference / max(float(each.float().abs().max()) for each in expected),
        "ms": {name: statistics.median(each) for name, each in walls.items()},
    }
    return row, graph


def _sustained(call: Call) -> float:
    """ms of one call in a long row of them, when power has settled."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(3 * ROW):
        if number == 2 * ROW:
            begin.record()
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / ROW


def _by_category(call: Call, device: torch.device) -> dict[str, float]:
    """ms of kernel time of one call by kind of work."""
    totals: dict[str, float] = {}
    ours = fused_kernel_names()
    for work in observe(call, device=device).work:
        category = category_of(work.name, ours=ours)
        totals[category] = totals.get(category, 0.0) + work.ms
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _equal(value: list[Tensor], expected: list[Tensor]) -> bool:
    return len(value) == len(expected) and all(map(torch.equal, value, expected))


if __name__ == "__main__":
    main()
