"""Results of the tier `moved_rounding`: how tasks label them, and what `task=verify` makes of them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pipeline import CONFIG
from torch import Tensor
from toy_pipeline import EAGER, Denoising, ToyPipeline, ToyRequest, gates, many_rows

from accel.errors import StrictModeError, UnequalBitsError
from accel.fusion import modulate, registry
from accel.fusion.savings import takes
from accel.policy import AccelPolicy
from accel.record import Kind, Outcome, Reason, RunRecord, SiteOutcome, StageRecord
from accel.region import region
from accel.site_names import SITE_NAMES
from tasks import arms, run, verify
from tasks.console import RunConsole
from tasks.measurement_settings import VerifyTask
from tasks.result_file import read_result
from tasks.verify import VERIFY_FILE

SAVING = replace(EAGER, name="saving", fused={"batched_guidance": True})
LONGEST = 64  # rows of a sample that the toy's saving serves


@pytest.fixture(autouse=True)
def toy_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's denoising adds in another order where it takes the saving."""

    @region
    def step(self: Denoising, tokens: Tensor, shift: Tensor) -> Tensor:
        long = f"{tokens.shape[1]} rows" if tokens.shape[1] > LONGEST else ""
        if takes("batched_guidance", unless=long):
            return (tokens * 0.1 + tokens * 0.2) + tokens * 0.3
        return tokens * 0.1 + (tokens * 0.2 + tokens * 0.3)

    monkeypatch.setattr(Denoising, "step", step)


def verified(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    pipeline: ToyPipeline,
    policy: AccelPolicy,
    *requests: ToyRequest,
) -> dict[str, Any]:
    monkeypatch.setattr(arms, "build", lambda config, *, progress: pipeline)
    monkeypatch.setattr(verify, "varied_requests", lambda config, arm, count: requests)
    task = VerifyTask(name="verify", requests=len(requests))
    verify.main(replace(CONFIG, accel=policy, task=task), folder=folder)
    written: dict[str, Any] = json.loads((folder / VERIFY_FILE).read_text())
    return written


def test_verify_finds_differences_and_no_broken_promise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verified(monkeypatch, tmp_path, ToyPipeline(), SAVING, ToyRequest())
    assert (found["status"], found["verdict"], found["tier"]) == ("ok", "unequal", "moved_rounding")
    assert found["accelerated"] is True
    assert found["blame"] is None
    assert [stage["tier"] for stage in found["stages"]] == ["exact", "moved_rounding"]
    assert "2 of 2 comparisons differ, as " in capsys.readouterr().out


def test_verify_excuses_no_stage_that_took_no_saving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @region
    def step(self: Denoising, tokens: Tensor, shift: Tensor) -> Tensor:
        takes("batched_guidance", unless="not here")
        return modulate(tokens, shift, shift)

    monkeypatch.setattr(Denoising, "step", step)
    monkeypatch.setattr(registry, "gate", gates(modulate=many_rows))
    policy = replace(SAVING, fused={"batched_guidance": True, "modulate": True})
    with pytest.raises(UnequalBitsError, match=r"denoising\.sample"):
        verified(monkeypatch, tmp_path, ToyPipeline(), policy, ToyRequest(), ToyRequest(width=96))


def test_result_and_table_carry_the_label(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "load", lambda config, *, progress: (ToyPipeline(SAVING), ToyRequest()))
    run.main(replace(CONFIG, accel=SAVING), folder=tmp_path)
    encoding, denoising = read_result(tmp_path).stages
    assert (encoding["tier"], denoising["tier"]) == ("exact", "moved_rounding")
    assert [(site["site"], site["fused"]) for site in denoising["sites"]] == [("batched_guidance", True)]
    text = capsys.readouterr().out
    assert "tier moved_rounding" in text
    (row,) = (line for line in text.splitlines() if line.startswith("denoising") and "batched" in line)
    assert "moved_rounding" in row


def test_strict_minds_a_saving_that_could_not_be_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long, strict = ToyRequest(width=LONGEST + 1), replace(SAVING, strict=True)
    monkeypatch.setattr(run, "load", lambda config, *, progress: (ToyPipeline(strict), long))
    with pytest.raises(StrictModeError, match=r"batched_guidance: 65 rows"):
        run.main(replace(CONFIG, accel=strict), folder=tmp_path)
    assert [stage["tier"] for stage in read_result(tmp_path).stages] == ["exact", "exact"]


def test_the_table_is_never_cut_by_the_longer_label() -> None:
    record = RunRecord()
    for name in ("observation_encoding", "denoising"):
        stage = record.stage(name)
        stage.tier = "moved_rounding"
        stage.add_wall(1.0)
        stage.outcomes.update({Outcome(Kind.REPLAYED): 20, Outcome(Kind.CAPTURED): 4})
        stage.outcomes[Outcome(Kind.EAGER, Reason.COMPONENT_OFFLOADED)] += 1
        stage.sites.update(SiteOutcome(site, fused=True) for site in SITE_NAMES)
    request = StageRecord("request")
    request.add_wall(2.0)
    file = io.StringIO()
    with RunConsole("plain", file=file) as console:
        console.report(record, request, unequal=[])
    text = file.getvalue()
    assert "…" not in text
    assert text.count("moved_rounding") == 2
    assert all(site in text for site in SITE_NAMES)
