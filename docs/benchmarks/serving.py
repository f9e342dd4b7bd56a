"""The policy server under nonsense, bad clients and load: does it hold, and what does it cost?

    python docs/benchmarks/serving.py OUT_FOLDER [--only PART] [--frames 100000] [OVERRIDES...]

Two servers in processes of their own, on loopback: one whose policy does nothing but check the observation,
for the protocols, and FLUX 3 Action as the overrides compose it (default: accel=graph+fused), for the cost
beside real inference. These are the parts `protocols` and `flux3`; `overhead` is the last of the protocols
alone. Writes serving.json and serving.md after every measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from provenance import provenance, versions
from serving_load import HALF_OPEN, SLOW_READERS, bad_neighbours, disconnects, fairness, growth, malformed
from serving_overhead import overhead, split
from serving_servers import Child, child, make_policy

from pipelines.build import choose_device
from tasks.heap import keep_freed_memory

CHECKING, MODEL = "policy that only checks", "FLUX 3 Action"


def markdown(report: Mapping[str, Any]) -> str:
    device = report["device"]
    model = f" {MODEL} ran with {' '.join(report['overrides'])}." if "flux3" in report else ""
    lines = [
        "# The policy server under nonsense, bad clients and load",
        "",
        f"    {report['command']}",
        "",
        f"{report['date']}, {device['device']} {device['name']}, {os.cpu_count()} CPU cores; "
        f"{versions(report)}.",
        "Client and server share the machine and talk over loopback; an observation is three 360 x 640 uint8",
        f"cameras, 2.1 MB.{model}",
        "",
        "Overhead is what a client waits for its answer less what the same call takes in its own process:",
        "there, too, raw arrays are checked and converted before the pipeline runs. Both take turns,",
        "A B B A, and their actions are equal bit for bit. A fair share is 8 times the p50 of a client",
        "alone; the clients at once are processes of their own. Jitter: mean difference of neighbours.",
        "",
        f"Load average of the machine before and after: {report['load_before']:.1f} and "
        f"{report['load_after']:.1f}.",
        "",
        "| What | Result |",
        "|---|---|",
        *(f"| {name} | {result} |" for name, result in _rows(report).items()),
    ]
    return "\n".join(lines) + "\n"


def _rows(report: Mapping[str, Any]) -> dict[str, str]:
    """Of what was measured so far."""
    measured = [rows(report[name]) for name, rows in ROWS.items() if name in report]
    return {what: result for rows in measured for what, result in rows.items()}


def _malformed_rows(bad: Mapping[str, Any]) -> dict[str, str]:
    return {
        "malformed frames and bodies": f"{bad['refused']:,}, all refused in words",
        "their memory": f"{bad['growth_mib']:+.1f} MiB",
    }


def _disconnect_rows(gone: Mapping[str, Any]) -> dict[str, str]:
    return {
        "abrupt disconnects": f"{gone['count']}, {gone['growth_mib']:+.1f} MiB",
        "20 answers for the client after them": f"{gone['back_after_s']:.1f} s",
    }


def _growth_rows(memory: Mapping[str, Any]) -> dict[str, str]:
    return {"requests in a row": f"{memory['requests']:,}, {memory['growth_mib']:+.1f} MiB"}


def _neighbour_rows(neighbours: Mapping[str, Any]) -> dict[str, str]:
    return {
        "p50 of a client alone": f"{neighbours['alone']['p50']:.2f} ms",
        f"beside {HALF_OPEN} silent sockets and {SLOW_READERS} clients that don't read": (
            f"{neighbours['beside']['p50']:.2f} ms"
        ),
        "silent sockets are closed after": f"{neighbours['silent_closed_after_s']:.1f} s",
    }


def _split_rows(parts: Mapping[str, Any]) -> dict[str, str]:
    return {
        "of which packing by this client, and by openpi-client": (
            f"{parts['packing']['p50']:.2f}, and {parts['packing_openpi']['p50']:.2f} ms"
        ),
        "of which loopback and WebSocket alone": f"{parts['network']['p50']:.2f} ms",
        "of which decoding": f"{parts['decoding']['p50']:.2f} ms",
    }


def _fairness_rows(policy: str, fair: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{policy}, {fair['clients']} clients at once": (
            f"{fair['answers_per_s']:.1f} answers/s, p50 {fair['p50']:.1f}, p99 {fair['p99']:.1f} ms"
        ),
        f"{policy}, their p99 over a fair share": f"{fair['p99_over_fair_share']:.2f}",
        f"{policy}, least over most served": f"{fair['least_over_most']:.3f}",
        f"{policy}, pings meanwhile, p50 and longest": (
            f"{fair['pings']['p50']:.1f} and {fair['pings']['max']:.1f} ms"
        ),
    }


def _overhead_rows(policy: str, cost: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{policy}, in process, p50, p99 and jitter": _times(cost["in_process"]),
        f"{policy}, served, p50, p99 and jitter": _times(cost["served"]),
        f"{policy}, overhead, p50": f"{cost['overhead']['p50']:.2f} ms",
    }


def _times(summary: Mapping[str, float]) -> str:
    return f"{summary['p50']:.2f}, {summary['p99']:.2f} and {summary['jitter']:.2f} ms"


def _command(args: argparse.Namespace, overrides: Sequence[str]) -> str:
    """With every option written out, also where its default may be another one day."""
    names = ("frames", "requests", "disconnects", "seconds", "inferences", "only")
    options = [f"--{name} {getattr(args, name)}" for name in names if getattr(args, name) is not None]
    return " ".join(["python docs/benchmarks/serving.py OUT_FOLDER", *options, shlex.join(overrides)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--frames", type=int, default=100_000, help="malformed frames and bodies")
    parser.add_argument("--requests", type=int, default=10_000, help="of the memory test; overhead: a fifth")
    parser.add_argument("--disconnects", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each fairness test")
    parser.add_argument("--inferences", type=int, default=200, help="of FLUX 3 Action")
    parser.add_argument("--only", choices=list(PARTS), help="one of these parts")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of FLUX 3 Action")
    args = parser.parse_intermixed_args()
    overrides = args.overrides or ["accel=graph+fused"]
    report: dict[str, Any] = {
        **provenance(choose_device("auto")),
        "command": _command(args, overrides),
        "overrides": overrides,
        "load_before": os.getloadavg()[0],
    }
    keep_freed_memory()  # as every task does
    args.out.mkdir(parents=True, exist_ok=True)
    for part in [args.only] if args.only else WHOLE_RUN:
        for name, measured in PARTS[part](args, overrides):
            print(f"{name}: measured", flush=True)
            report[name] = measured
            report["load_after"] = os.getloadavg()[0]
            (args.out / "serving.json").write_text(json.dumps(report, indent=1))
            (args.out / "serving.md").write_text(markdown(report))
    print(markdown(report))


ROWS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, str]]] = {
    "malformed": _malformed_rows,
    "disconnects": _disconnect_rows,
    "growth": _growth_rows,
    "bad_neighbours": _neighbour_rows,
    "fairness": partial(_fairness_rows, CHECKING),
    "overhead": partial(_overhead_rows, CHECKING),
    "split": _split_rows,
    "flux3": partial(_overhead_rows, MODEL),
    "flux3_fairness": partial(_fairness_rows, MODEL),
}
"""In the order of the page, by the name of the measurement."""

Measured: TypeAlias = Iterator[tuple[str, dict[str, Any]]]


def _protocols(args: argparse.Namespace, overrides: list[str]) -> Measured:
    with child([]) as server:
        yield "malformed", malformed(server, args.frames)
        yield "disconnects", disconnects(server, args.disconnects)
        yield "bad_neighbours", bad_neighbours(server)
        yield "growth", growth(server, args.requests)
        yield "fairness", fairness(server, args.seconds)
        yield from _cost(server, args.requests // 5)


def _overhead(args: argparse.Namespace, overrides: list[str]) -> Measured:
    with child([]) as server:
        yield from _cost(server, args.requests // 5)


def _cost(server: Child, requests: int) -> Measured:
    yield "overhead", overhead(server, make_policy([]), requests)
    yield "split", split(server, requests)


def _flux3(args: argparse.Namespace, overrides: list[str]) -> Measured:
    with child(overrides) as server:
        policy = make_policy(overrides)
        policy.warm_up()
        yield "flux3", overhead(server, policy, args.inferences)
        yield "flux3_fairness", fairness(server, args.seconds)


PARTS = {"protocols": _protocols, "overhead": _overhead, "flux3": _flux3}
WHOLE_RUN = ("protocols", "flux3")


if __name__ == "__main__":
    main()
