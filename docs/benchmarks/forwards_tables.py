"""The report of `forwards.py` as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from provenance import stamp

_IN_TURN = ("eager", "graph", "compile + graph", "fused", "graph+fused", "matmul + attention")


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# One transformer forward",
        "",
        stamp(report),
        "Command: `python docs/benchmarks/forwards.py OUT_FOLDER`. Synthetic bf16 weights, batch 1,",
        "medians in ms, a process for each work, arms in turn in it. Matmul + attention: the products of the",
        "fused forward as a graph of their own. Compile without a graph took turns with eager alone.",
        "",
        "| Work | tokens | eager | graph | compile | compile + graph | fused | graph + fused | matmul + "
        "attention | graph + fused to eager | to compile + graph | to matmul + attention | equal bits |",
        "|" + "---|" * 13,
    ]
    lines += [_row(name, row) for name, row in report["works"].items()]
    lines += [
        "",
        "ms of one call in a row of ten without a pause, when power has settled:",
        "",
        "| Work | " + " | ".join(_IN_TURN) + " |",
        "|---|" + "---|" * len(_IN_TURN),
    ]
    lines += [_sustained(name, row) for name, row in report["works"].items()]
    lines += [
        "",
        "Time to the first result after loading (mounting, verification and capture, or compilation), "
        "kernels, GPU-busy time of one profiled call and memory that graphs hold:",
        "",
        "| Work | graph + fused ready | compile ready | kernels plain | kernels fused | GPU busy plain | "
        "GPU busy fused | graph memory | compile differs by |",
        "|" + "---|" * 9,
    ]
    lines += [_costs(name, row) for name, row in report["works"].items()]
    lines += ["", "Kernel time by kind, ms:", "", "| Work | arm | by kind |", "|---|---|---|"]
    for name, row in report["works"].items():
        for arm, kinds in row["kernels"].items():
            text = ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds.items())
            lines.append(f"| {name} | {arm} | {text} |")
    return "\n".join(lines) + "\n"


def _row(name: str, row: dict[str, Any]) -> str:
    arms, compiled = row["arms"], row.get("compiled")
    ms = {arm: each["ms"] for arm, each in arms.items()}
    best = ms["graph+fused"]
    equal = all(each["equal"] and each["replay_equal"] for each in arms.values() if "equal" in each)
    return _cells(
        name,
        row["tokens"],
        *(f"{ms[arm]:.1f}" for arm in ("eager", "graph")),
        f"{compiled['ms']['compile']:.1f} ({row['compile_scope']})" if compiled else "-",
        _or_dash(ms, "compile + graph", lambda peer: f"{peer:.1f}"),
        *(f"{ms[arm]:.1f}" for arm in ("fused", "graph+fused", "matmul + attention")),
        f"{best / ms['eager']:.2f}",
        _or_dash(ms, "compile + graph", lambda peer: f"{best / peer:.2f}"),
        f"{best / ms['matmul + attention']:.2f}",
        "yes" if equal else "NO",
    )


def _sustained(name: str, row: dict[str, Any]) -> str:
    ms = {arm: each["sustained_ms"] for arm, each in row["arms"].items()}
    return _cells(name, *(_or_dash(ms, arm, lambda each: f"{each:.1f}") for arm in _IN_TURN))


def _costs(name: str, row: dict[str, Any]) -> str:
    arms, compiled = row["arms"], row.get("compiled")
    difference = f"{compiled['relative_difference']:.1e} of the largest value" if compiled else "-"
    return _cells(
        name,
        f"{arms['graph+fused']['cold_s']:.1f} s",
        f"{compiled['cold_s']:.0f} s" if compiled else "-",
        f"{arms['graph']['launches']:,}",
        f"{arms['fused']['launches']:,}",
        *(f"{arms[arm]['gpu_busy_ms']:.1f}" for arm in ("graph", "fused")),
        f"{arms['graph+fused']['extra_mib']:,.0f} MiB",
        "equal" if compiled and compiled["equal"] else difference,
    )


def _or_dash(values: dict[str, float], name: str, form: Callable[[float], str]) -> str:
    return form(values[name]) if name in values else "-"


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
