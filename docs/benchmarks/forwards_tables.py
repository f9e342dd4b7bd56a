"""The report of `forwards.py` as Markdown."""

from __future__ import annotations

from typing import Any


def markdown(report: dict[str, Any]) -> str:
    device = report["device"]
    versions = ", ".join(f"{name} {version}" for name, version in report["software"].items())
    lines = [
        "# One transformer forward",
        "",
        f"{report['date']}, {device.get('name', device)}; {versions}.",
        "Command: `python docs/benchmarks/forwards.py OUT_FOLDER`. Synthetic bf16 weights, batch 1,",
        "medians in ms, arms in turn in one process. Matmul + attention: the time of those kernels in the",
        "graph + fused forward in a row of them, at the clocks that the power limit leaves; the ratio to it",
        "is of that row too.",
        "",
        "| Work | tokens | eager | graph | compile | compile + graph | fused | graph + fused | matmul + "
        "attention | graph + fused to eager | to compile + graph | to matmul + attention | equal bits |",
        "|" + "---|" * 13,
    ]
    lines += [_row(name, row) for name, row in report["works"].items()]
    lines += [
        "",
        "Time to the first result after loading (mounting, verification and capture, or compilation), "
        "kernels launched, GPU-busy time and memory that graphs hold:",
        "",
        "| Work | graph + fused ready | compile ready | launches eager | launches fused | GPU busy eager | "
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
    kinds = row["kernels"]["graph+fused"]
    floor = kinds.get("matmul", 0.0) + kinds.get("attention", 0.0)
    eager, best = arms["eager"]["ms"], arms["graph+fused"]["ms"]
    peers = compiled["ms"] if compiled else {}
    equal = all(arms[arm]["equal"] and arms[arm]["replay_equal"] for arm in arms if arm != "eager")
    return _cells(
        name,
        row["tokens"],
        *(f"{each:.1f}" for each in (eager, arms["graph"]["ms"])),
        _ms(peers, "compile") + (f" ({row['compile_scope']})" if peers else ""),
        _ms(peers, "compile + graph"),
        *(f"{each:.1f}" for each in (arms["fused"]["ms"], best, floor)),
        f"{best / eager:.2f}",
        f"{best / peers['compile + graph']:.2f}" if peers else "-",
        f"{arms['graph+fused']['sustained_ms'] / floor:.2f}",
        "yes" if equal else "NO",
    )


def _costs(name: str, row: dict[str, Any]) -> str:
    arms, compiled = row["arms"], row.get("compiled")
    difference = f"{compiled['relative_difference']:.1e} of the largest value" if compiled else "-"
    return _cells(
        name,
        f"{arms['graph+fused']['cold_s']:.1f} s",
        f"{compiled['cold_s']:.0f} s" if compiled else "-",
        f"{arms['eager']['launches']:,}",
        f"{arms['fused']['launches']:,}",
        *(f"{arms[arm]['gpu_busy_ms']:.1f}" for arm in ("eager", "fused")),
        f"{arms['graph+fused']['extra_mib']:,.0f} MiB",
        "equal" if compiled and compiled["equal"] else difference,
    )


def _ms(walls: dict[str, float], name: str) -> str:
    return f"{walls[name]:.1f}" if name in walls else "-"


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
