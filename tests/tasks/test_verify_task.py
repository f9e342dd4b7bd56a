"""`task=verify` on a small pipeline: what it compares, whom it blames, and every way it can end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_pipeline import CONFIG
from toy_pipeline import EAGER, FUSED, GRAPHS, Denoising, ToyPipeline, ToyRequest, gates, many_rows

import pipelines.pipeline
from accel.errors import OutputError, StrictModeError, UnequalBitsError
from accel.fusion import registry
from accel.graphs.recording import RecordingBackend
from accel.policy import AccelPolicy
from accel.record import RunRecord, StageRecord
from accel.runner import Runner
from tasks import arms, verify
from tasks.bit_comparison import ROUNDS, Comparison
from tasks.measurement_settings import VerifyTask
from tasks.verify import VERIFY_FILE

ROOT = Path(__file__).resolve().parents[2]
NARROW, WIDE = ToyRequest(width=64), ToyRequest(width=96, seed=1)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on the CPU, which replay the recorded operations."""
    runner = partial(Runner, backend=RecordingBackend())
    monkeypatch.setattr(pipelines.pipeline, "Runner", runner)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the task in tmp_path and read its file."""

    def start(
        pipeline: ToyPipeline, policy: AccelPolicy, *, requests: tuple[ToyRequest, ...] = (NARROW, WIDE)
    ) -> dict[str, Any]:
        monkeypatch.setattr(arms, "build", lambda config, *, progress: pipeline)
        monkeypatch.setattr(verify, "varied_requests", lambda config, arm, count: requests)
        task = VerifyTask(name="verify", requests=len(requests))
        verify.main(replace(CONFIG, accel=policy, task=task), folder=tmp_path)
        return report(tmp_path)

    return start


def report(folder: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((folder / VERIFY_FILE).read_text())
    return written


def test_captures_and_replays_of_every_signature_are_compared(start, graphs, capsys) -> None:
    found = start(ToyPipeline(), GRAPHS)
    assert (found["status"], found["verdict"], found["tier"]) == ("ok", "equal", "exact")
    assert found["accelerated"] is True
    assert [visit["request"] for visit in found["comparisons"]] == [0, 1, 0, 1]
    assert {visit["outputs"] for visit in found["comparisons"]} == {2}
    kinds = {row["kind"]: row["count"] for row in found["stages"][1]["outcomes"]}
    assert kinds == {"captured": 2, "replayed": 2}
    assert found["requests"][1] == {"seed": 1, "prompt": "go", "width": 96}
    text = capsys.readouterr().out
    assert "EQUAL: accelerated results have the bits of eager ones." in text
    assert "request 1 x2, 2 outputs: equal  (seed 1, prompt go, width 96)" in text


def test_without_anything_accelerated_the_verdict_says_so_and_why(start, capsys) -> None:
    found = start(ToyPipeline(), replace(GRAPHS, fused={"modulate": True}))
    assert (found["status"], found["verdict"], found["accelerated"]) == ("ok", "equal", False)
    text = capsys.readouterr().out
    assert "EQUAL, but nothing was accelerated" in text
    assert "eager (no_cuda)" in text
    assert "tensors on cpu" in text


def test_a_kernel_that_the_gate_let_through_is_blamed(start, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(registry, "gate", gates(modulate=many_rows))
    with pytest.raises(
        UnequalBitsError, match=r"denoising\.sample, tensor 0\[0, 0, 0\]: eager 0x[0-9a-f]{8}"
    ):
        start(ToyPipeline(), FUSED)
    found = report(tmp_path)
    assert (found["status"], found["verdict"]) == ("unequal", "unequal")
    first, second = found["comparisons"][:2]
    assert first["difference"] is None
    assert (second["difference"]["stage"], second["difference"]["field"]) == ("denoising", "sample")
    assert second["difference"]["index"] == [0, 0, 0]
    assert int(second["difference"]["expected"], 16) != int(second["difference"]["actual"], 16)
    assert found["blame"]["culprits"] == ["the kernel 'modulate'"]
    assert "the kernel 'gated_residual'" in found["blame"]["tried"]
    text = capsys.readouterr().out
    assert "equal without the kernel 'modulate'" in text
    assert "UNEQUAL: 2 of 4 comparisons differ." in text
    assert UnequalBitsError.exit_code == 1


def test_two_wrong_kernels_are_found_together(start, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(registry, "gate", gates(modulate=many_rows, gated_residual=many_rows))
    with pytest.raises(UnequalBitsError):
        start(ToyPipeline(), FUSED)
    blame = report(tmp_path)["blame"]
    assert blame["culprits"] == ["all fused kernels of 'denoising' and the forwards mounted for them"]
    assert len(blame["tried"]) == 3


def test_a_kernel_that_the_gate_finds_wrong_changes_nothing(start, monkeypatch, capsys) -> None:
    monkeypatch.setattr(registry, "gate", gates(modulate=lambda *_: True))
    found = start(ToyPipeline(), FUSED)
    assert (found["status"], found["accelerated"]) == ("ok", True)
    text = capsys.readouterr().out
    assert "reference (mismatch)" in text
    assert "reference (disabled)" not in text


def test_a_graph_of_what_is_no_pure_function_is_blamed(start, graphs, tmp_path, capsys) -> None:
    pipeline = ToyPipeline(before=lambda stage, request: setattr(stage, "offset", float(request.seed)))
    with pytest.raises(UnequalBitsError, match=r"denoising\.sample"):
        start(pipeline, GRAPHS, requests=(NARROW, replace(NARROW, seed=1)))
    found = report(tmp_path)
    assert [visit["difference"] is None for visit in found["comparisons"]] == [True, False, True, False]
    assert found["blame"]["culprits"] == ["the graphs of 'denoising'"]
    assert "equal without the graphs of 'denoising'" in capsys.readouterr().out


def test_eager_that_differs_from_itself_is_told_apart(start, tmp_path, capsys) -> None:
    def drift(stage: Denoising, request: ToyRequest) -> None:
        stage.offset += 1

    with pytest.raises(UnequalBitsError, match=r"accel=eager gives different bits .* denoising\.sample"):
        start(ToyPipeline(before=drift), FUSED)
    found = report(tmp_path)
    assert (found["status"], found["eager_unequal"]) == ("unequal", ["denoising.sample"])
    assert found["blame"] is None
    text = capsys.readouterr().out
    assert "Eager differs from itself in" in text
    assert "UNDECIDED: eager gives different bits for the same request." in text


def test_files_are_compared_when_all_outputs_are_equal(start, tmp_path) -> None:
    with pytest.raises(
        UnequalBitsError, match=r"files\.toy\.bin, tensor 0\[2\]: eager 0x67, accelerated 0x61"
    ):
        start(ToyPipeline(file=lambda made: made.policy.name.encode()), replace(EAGER, name="eaaer"))
    found = report(tmp_path)
    assert found["blame"] is None
    assert [visit["difference"] is None for visit in found["comparisons"]] == [True, True, False, False]


def test_strict_fails_after_everything_is_written(start, tmp_path) -> None:
    with pytest.raises(StrictModeError, match="no_cuda"):
        start(ToyPipeline(), replace(GRAPHS, strict=True))
    assert report(tmp_path)["status"] == "not_strict"
    assert StrictModeError.exit_code == 3


def test_ctrl_c_keeps_what_was_compared(start, tmp_path, capsys) -> None:
    calls = iter(range(100))

    def before(stage: Denoising, request: ToyRequest) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(ToyPipeline(before=before), FUSED)
    found = report(tmp_path)
    assert (found["status"], len(found["comparisons"])) == ("interrupted", 1)
    assert "Interrupted" in capsys.readouterr().out


def test_a_second_run_does_not_replace_the_first(start, tmp_path) -> None:
    start(ToyPipeline(), FUSED)
    before = (tmp_path / VERIFY_FILE).read_bytes()
    with pytest.raises(OutputError, match="already holds a result"):
        start(ToyPipeline(), EAGER)
    assert (tmp_path / VERIFY_FILE).read_bytes() == before


def test_differences_of_compiled_stages_break_no_promise(monkeypatch) -> None:
    monkeypatch.setattr(registry, "gate", gates(modulate=many_rows))
    pipeline = ToyPipeline()
    accelerated = pipeline.with_policy(FUSED)
    found = Comparison(pipeline, accelerated, (NARROW, WIDE), "hash")
    found.run()
    assert found.broken is not None
    compiled = RunRecord({"denoising": StageRecord("denoising", tier="compiled")})
    monkeypatch.setattr(ToyPipeline, "record", compiled)
    assert found.broken is None
    assert len(found.differences) == 2
    found.find_culprits(FUSED)
    assert found.blame is None


def test_a_difference_that_does_not_come_back_blames_nobody(monkeypatch) -> None:
    calls = iter(range(1000))
    once = gates(modulate=lambda x, *_: many_rows(x) and next(calls) == 0)
    monkeypatch.setattr(registry, "gate", once)
    pipeline = ToyPipeline()
    found = Comparison(pipeline, pipeline.with_policy(FUSED), (NARROW, WIDE), "hash")
    found.run()
    found.find_culprits(FUSED)
    assert found.blame is not None
    assert not found.blame.reproduced
    assert "did not come back" in str(found.blame)


@pytest.mark.parametrize(
    ("runs", "found", "said"),
    [
        (0, [], "nobody"),
        (1, [], "none alone; still different without anything"),
        (2, ["the kernel 'modulate'"], "equal without the kernel 'modulate'"),
    ],
)
def test_a_search_that_fails_leaves_the_verdict(
    start, monkeypatch, tmp_path, capsys, runs: int, found: list[str], said: str
) -> None:
    monkeypatch.setattr(registry, "gate", gates(modulate=many_rows))
    with_policy, made = ToyPipeline.with_policy, iter(range(100))

    def out_of_memory(pipeline: ToyPipeline, policy: AccelPolicy) -> ToyPipeline:
        if next(made) == 1 + runs:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
        return with_policy(pipeline, policy)

    monkeypatch.setattr(ToyPipeline, "with_policy", out_of_memory)
    with pytest.raises(UnequalBitsError, match=r"denoising\.sample"):
        start(ToyPipeline(), FUSED)
    assert report(tmp_path)["status"] == "unequal"
    assert report(tmp_path)["blame"]["culprits"] == found
    text = capsys.readouterr().out
    assert f"  {said}; the search ended early: OutOfMemoryError: Tried to allocate 2 GiB." in text
    assert "UNEQUAL: 2 of 4 comparisons differ." in text


def test_comparison_runs_every_request_once_a_round() -> None:
    pipeline = ToyPipeline()
    found = Comparison(pipeline, pipeline.with_policy(EAGER), (NARROW, WIDE), "hash")
    found.run()
    assert [visit.request for visit in found.visits] == [0, 1] * ROUNDS


def test_tiny_model_on_a_cpu(tmp_path: Path) -> None:
    done = run("task=verify", "task.requests=2", f"output.dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert "EQUAL, but nothing was accelerated" in done.stdout
    found = report(tmp_path / "out")
    assert (found["verdict"], found["accelerated"], len(found["comparisons"])) == ("equal", False, 4)
    prompts = [request["prompt"] for request in found["requests"]]
    assert len({len(prompt) for prompt in prompts}) == 2


def test_tiny_model_on_a_cpu_is_exit_code_3_when_strict(tmp_path: Path) -> None:
    done = run("task=verify", "task.requests=1", "accel.strict=true", f"output.dir={tmp_path / 'out'}")
    assert done.returncode == 3
    assert re.search(r"eager \(no_cuda\)", done.stderr)
    assert "Traceback" not in done.stderr
    assert report(tmp_path / "out")["status"] == "not_strict"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "run.py", "device=cpu", "logger=plain", "model.steps=1", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
