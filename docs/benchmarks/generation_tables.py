"""The Markdown page of `generation.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from provenance import stamp

from accel.measure.timing import median
from tasks.markdown_table import markdown_table

# What a request's time is kept by, beside those of its stages.
REQUEST = "request"

_REQUESTS = (
    *("Work", "arm", "request p50 ms", "eager beside it ms", "speed-up", "first result s", "launches"),
    *("host launches", "GPU busy ms", "graph memory MiB", "equal to eager"),
)
_STAGES = (
    *("Stage", "arm", "p50 ms", "eager beside it ms", "speed-up", "launches", "host launches"),
    *("GPU busy ms", "region calls"),
)


def markdown(report: Mapping[str, Any]) -> str:
    """The page of what `generation.json` holds; works and arms that failed are rows with their error."""
    works = report["works"]
    lines = [
        "# Whole requests",
        "",
        stamp(report, f"size={report['size']}"),
        "Command: `python docs/benchmarks/generation.py OUT_FOLDER`. Synthetic weights, batch 1, one",
        "process; every request encodes its prompts anew. Medians. An arm takes turns with eager (A B B A);",
        "its speed-up is to those turns of eager. First result: from loaded weights through mounting,",
        "proofs, captures or compilation to the end of one request. Launches and GPU-busy time are of one",
        "request under the profiler.",
        "",
        *markdown_table(
            _REQUESTS, [row for work in works.items() for row in _requests(*work)], text_columns=2
        ),
        "",
        *_notes(works),
        "",
    ]
    for name, work in works.items():
        rows = list(_stages(work["arms"]))
        if rows:
            lines += [f"## {name}, by stage", "", *markdown_table(_STAGES, rows, text_columns=2), ""]
    return "\n".join([*lines, *_violations(works)]) + "\n"


def _requests(name: str, work: Mapping[str, Any]) -> Iterator[list[str]]:
    for arm, row in work["arms"].items():
        if "times" in row:
            yield _measured(name, arm, row, work)
        if "error" in row:
            yield _failed(name, arm, row["error"])
    if "error" in work:
        yield _failed(name, "-", work["error"])


def _measured(name: str, arm: str, row: Mapping[str, Any], work: Mapping[str, Any]) -> list[str]:
    stages = row["stages"]
    return [
        name,
        arm,
        *_speed(row, REQUEST),
        f"{row['first_s']:.1f}",
        *(_total(stages, fact) for fact in ("launches", "host_launches")),
        _total(stages, "gpu_busy_ms", digits=1),
        f"{sum(stage['extra_bytes'] for stage in stages) / 2**20:,.0f}",
        _verdict(arm, row, work),
    ]


def _stages(arms: Mapping[str, Any]) -> Iterator[list[str]]:
    measured = {arm: {stage["name"]: stage for stage in row.get("stages", ())} for arm, row in arms.items()}
    for name in measured.get("eager", ()):
        for arm, stages in measured.items():
            if name not in stages:
                continue
            stage, calls = [stages[name]], _calls(stages[name]["outcomes"])
            own, eager, gain = _speed(arms[arm], name)
            yield [
                name,
                arm,
                *(own, eager, gain if calls else "-"),
                *(_total(stage, fact) for fact in ("launches", "host_launches")),
                _total(stage, "gpu_busy_ms", digits=1),
                calls or "none",
            ]


def _speed(row: Mapping[str, Any], part: str) -> list[str]:
    """Own median, eager's in the same turns, and their ratio; eager has its own alone."""
    own = median([times[part] for times in row["times"]])
    if "eager_times" not in row:
        return [f"{own:.1f}", "-", "-"]
    eager = median([times[part] for times in row["eager_times"]])
    return [f"{own:.1f}", f"{eager:.1f}", f"{eager / own:.2f}" if own else "-"]


def _total(stages: Sequence[Mapping[str, Any]], fact: str, *, digits: int = 0) -> str:
    """Over the stages that were profiled."""
    values = [stage[fact] for stage in stages if stage[fact] is not None]
    return f"{sum(values):,.{digits}f}" if values else "-"


def _calls(outcomes: Sequence[Mapping[str, Any]]) -> str:
    counted: dict[str, int] = {}
    for outcome in outcomes:
        name = outcome["kind"] + (f" ({outcome['reason']})" if outcome["reason"] else "")
        counted[name] = counted.get(name, 0) + outcome["count"]
    return ", ".join(f"{count} {name}" for name, count in counted.items())


def _verdict(arm: str, row: Mapping[str, Any], work: Mapping[str, Any]) -> str:
    """Outputs that eager itself does not repeat tell nothing about an arm."""
    unstable = work["arms"]["eager"]["unequal"]
    if arm == "eager":
        return f"not repeatable: {', '.join(unstable)}" if unstable else "-"
    differing = {name: share for name, share in row["unequal"].items() if name not in unstable}
    if differing:
        worst = max(differing, key=lambda name: differing[name])
        return f"no: up to {differing[worst]:.1e} of the largest value ({worst}, of {len(differing)} outputs)"
    left_out = f" ({len(unstable)} not repeatable left out)" if unstable else ""
    return f"yes, {work['outputs'] - len(unstable)} outputs of {len(row['times'])} requests{left_out}"


def _failed(name: str, arm: str, error: str) -> list[str]:
    return [name, arm, *["-"] * (len(_REQUESTS) - 3), error]


def _notes(works: Mapping[str, Any]) -> list[str]:
    lines = [f"- {name}: {work['note']}." for name, work in works.items() if work["note"]]
    for name, work in works.items():
        if work.get("not_finite"):
            lines.append(f"- {name}: not finite in eager: {', '.join(work['not_finite'])}.")
    return lines


def _violations(works: Mapping[str, Any]) -> list[str]:
    """What was to be accelerated and was not, as `accel.strict` would tell it."""
    found = [
        f"- {name}, {arm}: {line}"
        for name, work in works.items()
        for arm, row in work["arms"].items()
        for line in row.get("violations", ())
    ]
    return ["## Not accelerated", "", *(found or ["Nothing: every planned call was."])]
