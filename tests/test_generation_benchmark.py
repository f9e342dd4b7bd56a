"""docs/benchmarks/generation.py, tried with tiny models: what it measures and how its page reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from accel.record import RunRecord

KLEIN = "FLUX.2 klein 4B, 512x512, 4 steps"
KLEINS = (KLEIN, "FLUX.2 klein 4B, 1024x1024, 4 steps")  # on the same weights
LTX2 = "LTX-2.0, small"
BENCHMARKS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import generation

    return generation


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> dict[str, Any]:
    command = ["generation.py", str(out), "--size=tiny", "--device=cpu", *options]
    monkeypatch.setattr("sys.argv", command)
    script.main()
    report: dict[str, Any] = json.loads((out / "generation.json").read_text())
    return report


def page_row(out: Path, *cells: str) -> str:
    """The one line of the page's tables that begins with these cells."""
    start = f"| {' | '.join(cells)} |"
    (row,) = [line for line in (out / "generation.md").read_text().splitlines() if line.startswith(start)]
    return row


def test_arms_are_timed_and_compared_and_a_failed_one_is_a_row(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy_of = script.policy_of

    def failing(arm: str, *model: str) -> Any:
        if arm == "fused":
            raise RuntimeError("no fused kernels today")
        return policy_of(arm, *model)

    monkeypatch.setattr(script, "policy_of", failing)

    arms = ["graph+fused", "fused", "graph"]
    work = run(script, monkeypatch, tmp_path, "--only", KLEIN, "--arms", *arms)["works"][KLEIN]

    assert "error" not in work
    assert list(work["arms"]) == ["eager", *arms]
    assert "no fused kernels today" in work["arms"]["fused"]["error"]
    for name in ("graph+fused", "graph"):
        row = work["arms"][name]
        assert row["unequal"] == {}
        assert [stage["name"] for stage in row["stages"]] == [
            "text_encoding",
            "image_encoding",
            "denoising",
            "vae",
        ]
        assert len(row["times"]) == len(row["eager_times"]) == 2
        for times in row["times"]:
            assert sum(times.values()) - times["request"] <= times["request"]
        text = row["stages"][0]["outcomes"]
        assert text == [{"kind": "eager", "reason": "no_cuda", "detail": "", "count": 4}]  # cold, warm, timed
        assert "yes, 3 outputs of 2 requests" in page_row(tmp_path, KLEIN, name)
    assert "no fused kernels today" in page_row(tmp_path, KLEIN, "fused")
    assert "denoising: eager (no_cuda)" in (tmp_path / "generation.md").read_text()


def test_arms_of_an_earlier_call_are_kept(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = run(script, monkeypatch, tmp_path, "--only", *KLEINS, "--arms", "graph")["works"]

    works = run(script, monkeypatch, tmp_path, "--only", *KLEINS, "--arms", "fused")["works"]

    for name, work in works.items():
        assert work["arms"]["graph"] == first[name]["arms"]["graph"]
        assert not any("error" in row for row in work["arms"].values())
        for arm in ("eager", "graph", "fused"):
            assert page_row(tmp_path, name, arm)


def test_arms_of_an_earlier_call_are_kept_where_their_work_fails_anew(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(script, monkeypatch, tmp_path, "--only", KLEIN, "--arms", "graph")
    kept = page_row(tmp_path, KLEIN, "graph")

    late = run(script, monkeypatch, tmp_path, "--minutes=-1", "--only", KLEIN, "--arms", "fused")
    row_then = page_row(tmp_path, KLEIN, "graph")
    again = run(script, monkeypatch, tmp_path, "--only", KLEIN, "--arms", "fused")

    assert "error" in late["works"][KLEIN]
    assert "error" not in again["works"][KLEIN]
    assert kept == row_then == page_row(tmp_path, KLEIN, "graph")
    assert kept.endswith("| yes, 3 outputs of 2 requests |")


def test_arms_of_other_steps_are_not_kept(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only = ["--only", LTX2]
    run(script, monkeypatch, tmp_path, *only, "--arms", "graph")
    kept = run(script, monkeypatch, tmp_path, *only, "--arms", "fused", "--ltx-steps=2")["works"][LTX2]

    work = run(script, monkeypatch, tmp_path, *only, "--arms", "segmented", "--ltx-steps=3")["works"][LTX2]

    assert list(kept["arms"]) == ["eager", "graph", "fused"]
    assert list(work["arms"]) == ["eager", "segmented"]
    assert "3 denoising steps" in work["note"]


def test_every_arm_means_something_for_its_model(script: ModuleType) -> None:
    for work in script.works(size="full", ltx_steps=2).values():
        for arm in work.arms:
            assert script.policy_of(arm, *work.model)


def test_what_would_begin_too_late_is_a_row_beside_what_was_measured_before(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(script, monkeypatch, tmp_path, "--minutes=-1", "--only", KLEIN)

    report = run(script, monkeypatch, tmp_path, "--minutes=-1", "--only", "LTX-2.0, small")

    assert list(report["works"]) == [KLEIN, "LTX-2.0, small"]
    for name in report["works"]:
        assert "not measured: -1 minutes were over" in page_row(tmp_path, name)


def test_one_element_that_differs_is_told_as_a_share_of_the_largest(script: ModuleType) -> None:
    given = {"a.same": torch.tensor([1.0, -8.0]), "a.other": [torch.tensor([1.0, -8.0])], "a.text": ("note",)}
    outputs = {**given, "a.other": [torch.tensor([3.0, -8.0])]}
    arm = script.MeasuredArm(
        SimpleNamespace(run=lambda request: SimpleNamespace(outputs=outputs), record=RunRecord())
    )

    arm.compare("request", given)

    assert arm.unequal == {"a.other": 0.25}
    assert [list(times) for times in arm.times] == [["request"]]


@pytest.fixture
def measured() -> dict[str, Any]:
    """A report of one work: eager, an arm of 4 outputs in 2 requests, half as long, and its stage."""

    def row(ms: float, **more: Any) -> dict[str, Any]:
        stage = {"name": "vocoder", "outcomes": [{"kind": "replayed", "reason": None, "count": 3}]}
        activity = {"launches": 7, "host_launches": 1, "gpu_busy_ms": 2.5, "extra_bytes": 3 * 2**20}
        times = [{"request": ms, "vocoder": ms / 2}] * 2
        return {"first_s": 1.5, "times": times, "unequal": {}, "violations": [], **more} | {
            "stages": [stage | activity]
        }

    arms = {"eager": row(20.0), "graph": row(10.0, eager_times=row(20.0)["times"])}
    work = {"note": "", "outputs": 4, "not_finite": [], "arms": arms}
    facts = {"date": "2026-01-01", "software": {"torch": "2.11"}, "device": {"name": "H"}, "size": "full"}
    return {**facts, "works": {"clip": work}}


def test_page_tells_times_launches_and_memory(script: ModuleType, measured: dict[str, Any]) -> None:
    lines = script.markdown(measured).splitlines()

    assert (
        "| clip | graph | 10.0 | 20.0 | 2.00 | 1.5 | 7 | 1 | 2.5 | 3 | yes, 4 outputs of 2 requests |"
        in lines
    )
    assert "| vocoder | graph | 5.0 | 10.0 | 2.00 | 7 | 1 | 2.5 | 3 replayed |" in lines


def test_page_keeps_what_was_measured_before_an_error(script: ModuleType, measured: dict[str, Any]) -> None:
    measured["works"]["clip"]["arms"]["graph"]["error"] = "the profiler failed"

    lines = script.markdown(measured).splitlines()

    first, second = [line for line in lines if line.startswith("| clip | graph |")]
    assert first.startswith("| clip | graph | 10.0 |")
    assert second.endswith("| the profiler failed |")


@pytest.mark.parametrize(
    ("eager", "graph", "verdict"),
    [
        ({}, {}, "yes, 4 outputs of 2 requests"),
        (
            {},
            {"vae.frames": 0.5, "x.y": 0.1},
            "no: up to 5.0e-01 of the largest value (vae.frames, of 2 outputs)",
        ),
        (
            {"vocoder.waveform": 1e-7},
            {"vocoder.waveform": 1e-7},
            "yes, 3 outputs of 2 requests (1 not repeatable left out)",
        ),
        (
            {"vocoder.waveform": 1e-7},
            {"x.y": 0.0},
            "no: up to 0.0e+00 of the largest value (x.y, of 1 outputs)",
        ),
    ],
)
def test_page_calls_equal_only_what_eager_repeats_and_the_arm_matches(
    script: ModuleType,
    measured: dict[str, Any],
    eager: dict[str, float],
    graph: dict[str, float],
    verdict: str,
) -> None:
    arms = measured["works"]["clip"]["arms"]
    arms["eager"]["unequal"], arms["graph"]["unequal"] = eager, graph

    page = script.markdown(measured)

    (row,) = [line for line in page.splitlines() if line.startswith("| clip | graph |")]
    assert row.endswith(f"| {verdict} |")
    assert ("not repeatable: vocoder.waveform" in page) == bool(eager)
