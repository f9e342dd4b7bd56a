"""docs/benchmarks/serving.py: what its page tells, also of a run that was cut off."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"

TIMES = {"p50": 5.0, "p99": 7.0, "max": 9.0, "jitter": 0.25}
COST = {"served": TIMES, "in_process": TIMES, "overhead": TIMES}
FAIR = {"clients": 8, "answers_per_s": 9.5, "p99_over_fair_share": 1.5, "least_over_most": 0.9} | TIMES
MEASURED = {
    "malformed": {"refused": 100_000, "growth_mib": 0.5},
    "disconnects": {"count": 500, "growth_mib": 0.5, "back_after_s": 0.25},
    "bad_neighbours": {"alone": TIMES, "beside": TIMES, "silent_closed_after_s": 10.0},
    "growth": {"requests": 10_000, "growth_mib": -0.5},
    "fairness": FAIR | {"pings": TIMES},
    "overhead": COST,
    "split": {"packing": TIMES, "packing_openpi": TIMES, "network": TIMES, "decoding": TIMES},
    "flux3": COST,
    "flux3_fairness": FAIR | {"pings": TIMES},
}
"""In the order in which a whole run measures."""
ROWS = {"malformed": 2, "disconnects": 2, "bad_neighbours": 3, "growth": 1, "fairness": 4} | {
    "overhead": 3,
    "split": 3,
    "flux3": 3,
    "flux3_fairness": 4,
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import serving

    return serving


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["serving.py", str(out), *options])
    script.main()


def labels(page: Path) -> list[str]:
    """The first column of the page's table."""
    table = page.read_text().partition("|---|---|\n")[2].partition("\n\n")[0]
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]


@pytest.mark.parametrize("count", range(1, len(MEASURED) + 1))
def test_what_was_measured_before_a_run_was_cut_off_is_on_its_page(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int
) -> None:
    def cut_off(*_: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from list(MEASURED.items())[:count]
        raise RuntimeError("the machine is gone")

    monkeypatch.setattr(script, "PARTS", {"protocols": cut_off})
    monkeypatch.setattr(script, "WHOLE_RUN", ("protocols",))

    with pytest.raises(RuntimeError, match="the machine is gone"):
        run(script, monkeypatch, tmp_path)

    measured, told = list(MEASURED)[:count], labels(tmp_path / "serving.md")
    assert len(told) == sum(ROWS[name] for name in measured)
    assert told == [label for label in labels(BENCHMARKS / "serving.md") if label in told]
    assert ("FLUX 3 Action" in (tmp_path / "serving.md").read_text()) == ("flux3" in measured)


def test_a_mistyped_option_is_refused_before_anything_runs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(script, monkeypatch, tmp_path / "out", "--secnds", "5")

    assert ended.value.code == 2
    assert "unrecognized arguments: --secnds" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("first", [True, False])
def test_the_page_tells_its_command_wherever_the_folder_stands(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: bool
) -> None:
    given: list[list[str]] = []

    def measured(_: Any, overrides: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        given.append(overrides)
        yield "growth", MEASURED["growth"]

    monkeypatch.setattr(script, "PARTS", {"protocols": measured})
    out, options = [str(tmp_path)], ["--only", "protocols", "--seconds", "5"]
    command = ["serving.py", *(out + options if first else options + out), "size=tiny", "prompt='a b'"]
    monkeypatch.setattr("sys.argv", command)

    script.main()

    told = json.loads((tmp_path / "serving.json").read_text())["command"]
    words = shlex.split(told)
    assert given == [["size=tiny", "prompt='a b'"]]
    assert words[:3] == ["python", "docs/benchmarks/serving.py", "OUT_FOLDER"]
    assert words[-2:] == given[0]
    assert "--only protocols" in told
    assert "--seconds 5" in told
    assert str(tmp_path) not in told
    assert f"    {told}\n" in (tmp_path / "serving.md").read_text()


def test_the_overhead_is_measured_by_itself(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(script, monkeypatch, tmp_path, "--only", "overhead", "--requests", "100")

    report = json.loads((tmp_path / "serving.json").read_text())
    assert report.keys() & MEASURED.keys() == {"overhead", "split"}
    assert report["overhead"]["served"]["p50"] > report["overhead"]["in_process"]["p50"]
    assert [label.partition(",")[0] for label in labels(tmp_path / "serving.md")] == [
        *["policy that only checks"] * 3,
        "of which packing by this client",
        "of which loopback and WebSocket alone",
        "of which decoding",
    ]
