"""The Markdown page of `flux3_action.py`."""

from __future__ import annotations

from typing import Any

from accel.measure.timing import percentile


def markdown(report: dict[str, Any]) -> str:
    device, software_ = report["device"], report["software"]
    lines = [
        "# FLUX 3 Action, full size, one request",
        "",
        f"{report['date']}. {_facts(device)}. {_facts(software_)}.",
        "Command: `python docs/benchmarks/flux3_action.py OUT_FOLDER`. Synthetic bf16 weights, DROID shapes,",
        "4 steps, guidance 4.0 / 1.0; every request encodes its prompt and the empty caption anew. "
        f"Medians of {len(report['arms']['eager']['walls_ms'])} requests, "
        "policies in turn A B B A in one process.",
        "",
        "| Policy | request p50 ms | p95 ms | speed-up | caption cached ms | kernels | host launches "
        "| GPU busy ms | extra MiB | capture s | equal to eager |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    eager = percentile(report["arms"]["eager"]["walls_ms"], 50)
    for arm, row in report["arms"].items():
        p50, p95 = (percentile(row["walls_ms"], p) for p in (50, 95))
        launches = sum(stage["launches"] or 0 for stage in row["stages"])
        host = sum(stage["host_launches"] or 0 for stage in row["stages"])
        cached = sum(percentile(stage["walls_ms"], 50) for stage in row["stages"][1:])
        busy = sum(stage["gpu_busy_ms"] or 0 for stage in row["stages"])
        extra = sum(stage["extra_bytes"] for stage in row["stages"]) / 2**20
        capture = sum(stage["capture_ms"] for stage in row["cold"]) / 1e3
        lines.append(
            f"| {arm} | {p50:.1f} | {p95:.1f} | {eager / p50:.2f} | {cached:.1f} | {launches:,} | {host:,} "
            f"| {busy:.1f} | {extra:.0f} | {capture:.1f} | {_verdict(report['equality'].get(arm))} |"
        )
    lines += [
        "",
        "## By stage",
        "",
        "| Stage | Policy | p50 ms | kernels | host launches | GPU busy ms | wall / busy "
        "| outcomes | sites |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for index, stage in enumerate(report["arms"]["eager"]["stages"]):
        for arm, row in report["arms"].items():
            own = row["stages"][index]
            p50, busy = percentile(own["walls_ms"], 50), own["gpu_busy_ms"] or 0
            lines.append(
                f"| {stage['name']} | {arm} | {p50:.2f} | {own['launches']} | {own['host_launches']} "
                f"| {busy:.2f} | {p50 / busy if busy else 0:.3f} | {_counts(own['outcomes'])} "
                f"| {_sites(row['cold'][index])} |"
            )
    lines += ["", *_passes(report["joint_pass"])]
    return "\n".join(lines)


def _passes(passes: dict[str, Any]) -> list[str]:
    tokens = passes["eager"]["tokens"]
    lines = [
        f"## One joint pass of the transformer, {tokens:,} tokens",
        "",
        "| Kernels | launched ms | GPU busy ms | kernels | captured ms |",
        "|---|---|---|---|---|",
    ]
    for arm, row in passes.items():
        lines.append(
            f"| {arm} | {row['launched_ms']:.1f} | {row['gpu_busy_ms']:.1f} | {row['launches']:,} "
            f"| {row['captured_ms']:.1f} |"
        )
    return [*lines, ""]


def _facts(facts: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in dict(facts).items())


def _verdict(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    good = not row["differing"] and row["finite"]
    total = row["requests"] * row["outputs_each"]
    return f"yes, {total} outputs of {row['requests']} requests" if good else f"NO: {row['differing'][:2]}"


def _counts(outcomes: list[dict[str, Any]]) -> str:
    return ", ".join(map(_count, outcomes)) or "-"


def _count(outcome: dict[str, Any]) -> str:
    why = ": ".join(filter(None, (outcome["reason"], outcome["detail"])))
    return f"{outcome['count']} {outcome['kind']}" + (f" ({why})" if why else "")


def _sites(cold: dict[str, Any]) -> str:
    fused = sorted({s["site"] for s in cold["sites"] if s["fused"]})
    refused = sorted(
        {
            f"{s['site']} ({s['reason']})"
            for s in cold["sites"]
            if not s["fused"] and s["reason"] != "disabled"
        }
    )
    return ", ".join(fused + refused) or "-"
