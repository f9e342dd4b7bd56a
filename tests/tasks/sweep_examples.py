"""Results of jobs as the `run` task writes them, and folders of sweeps that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.record import Kind, Outcome, Reason, SiteOutcome, StageRecord
from tasks.job_record import recorded
from tasks.result_file import RESULT_FILE, RunResult, Status, encode_result
from tasks.sweep import Job

STAGES = ("text_encoding", "denoising")


def example_result(
    *,
    accel: str = "eager",
    model: str = "flux3_action",
    seed: int = 1,
    walls_ms: Sequence[float] = (4.0, 4.0, 6.0),
    status: Status = "ok",
    config_hash: str = "",
    digests: Mapping[str, str] | None = None,
    extra_bytes: int = 0,
    device: str = "CPU",
    reason: Reason | None = None,
) -> RunResult:
    """Two stages, of a quarter and three quarters of the time. reason: why both ran eager."""
    request = StageRecord("request", cold_ms=9.0, walls_ms=list(walls_ms))
    stages = []
    for name, share in zip(STAGES, (0.25, 0.75), strict=True):
        stage = StageRecord(name, cold_ms=9 * share, walls_ms=[share * wall for wall in walls_ms])
        stage.launches, stage.host_launches, stage.gpu_busy_ms = 100, 10, 0.5 * share * walls_ms[0]
        stage.extra_bytes = extra_bytes // 2
        stage.outcomes[Outcome(Kind.EAGER, reason, "aten::item") if reason else Outcome(Kind.REPLAYED)] = 2
        stage.sites[SiteOutcome("swiglu", reason is None, reason, "on cpu" if reason else "")] = 3
        stages.append(stage.to_dict())
    return RunResult(
        status=status,
        verdict="equal",
        pipeline={"model": model},
        config={"model": {"name": model}, "seed": seed, "accel": policy(accel)},
        config_hash=config_hash,
        environment={"device": {"name": device}},
        requests=1 + len(walls_ms),
        unequal_outputs=[],
        strict_violations=[],
        request=request.to_dict(),
        stages=stages,
        notes=[],
        digests=dict(digests or {"text_encoding.text": "aa", "denoising.actions": str(seed)}),
        files={},
    )


def policy(name: str, **changes: Any) -> dict[str, Any]:
    """`accel` of a resolved configuration, as far as a comparison reads it."""
    graphs = "graph" in name
    return {"name": name, "enable_cuda_graph": graphs, "compile": None, "fused": {}, "stages": {}} | changes


def write_job(
    sweep: Path, number: int, *overrides: str, result: RunResult | None = None, error: str = ""
) -> Job:
    """A job's folder as it is after a sweep."""
    folder = sweep / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    chosen: dict[str, Any] = dict(text.split("=", 1) for text in overrides)
    with recorded(
        folder,
        number=number,
        overrides=overrides,
        model=chosen.get("model", "flux3_action"),
        accel=chosen["accel"],
        task=chosen.get("task", "run"),
        device="cpu",
    ):
        if result is not None:
            (folder / RESULT_FILE).write_bytes(encode_result(result))
        if error:
            (folder / "error.txt").write_text(error)
    return Job(overrides, folder, number)
