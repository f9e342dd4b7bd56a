"""What a pipeline held is free once it is dropped: the next one of a process needs the memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import pipelines.pipeline
from accel.graphs.recording import RecordingBackend
from accel.runner import Runner
from pipelines.build import build
from tasks.config import compose

ROOT = Path(__file__).resolve().parents[2]
TINY = ("device=cpu", "size=tiny", "model.steps=2", "model.height=64", "model.width=64")
MODELS = {
    "klein": ("model=flux2_klein", "model.variant=4b-base", "model.guidance=3.0"),
    "dev": ("model=flux2_dev",),
    "ltx 2.0": ("model=ltx2", "model.frames=9", "model.save_as=frames"),
    "ltx 2.3 in two stages": (
        "model=ltx2",
        "model.variant='2.3'",
        "model.two_stage=true",
        "model.height=128",
        "model.width=128",
        "model.frames=9",
        "model.save_as=frames",
    ),
}


def parts_after_requests(*overrides: str) -> dict[str, weakref.ref[nn.Module]]:
    """Serve two requests as configured, drop the pipeline, and keep only weak references."""
    config = compose(*TINY, *overrides)
    pipeline = build(config)
    pipeline.warm_up([pipeline.request_from(config)])
    pipeline.run(pipeline.request_from(config))
    return {
        f"{component}.{name}": weakref.ref(part)
        for stage in pipeline.stages
        for component, module in stage.modules().items()
        for name, part in module.named_modules()
    }


@pytest.mark.parametrize("policy", ["accel=eager", "accel=fused", "accel=graph+fused", "accel=segmented"])
@pytest.mark.parametrize("model", MODELS)
def test_weights_go_with_the_pipeline(model: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    parts = parts_after_requests(*MODELS[model], policy)
    components = {name.partition(".")[0] for name in parts}
    assert components >= {"transformer", "text_encoder", "vae"}
    gc.collect()
    assert [name for name, reference in parts.items() if reference() is not None] == []


SWEEP = """
import runpy, weakref
from functools import partial
import pipelines.pipeline, tasks.run
from accel.graphs.recording import RecordingBackend
from accel.runner import Runner

pipelines.pipeline.Runner = partial(Runner, backend=RecordingBackend())
build, built = tasks.run.build, []

def left_over():
    return [name for name, part in built if part() is not None]

def watched(*args, **kwargs):
    print("JOB finds", left_over())
    pipeline = build(*args, **kwargs)
    for stage in pipeline.stages:
        for module in stage.modules().values():
            built.extend((name, weakref.ref(part)) for name, part in module.named_modules())
    return pipeline

tasks.run.build = watched
try:
    runpy.run_path("run.py", run_name="__main__")
finally:
    print("END finds", left_over())
"""


@pytest.mark.parametrize("model", ["klein", "ltx 2.0"])
def test_jobs_of_a_sweep_leave_nothing_to_the_next(model: str, tmp_path: Path) -> None:
    """Also one that fails after its request, whose traceback knows everything."""
    done = subprocess.run(
        [
            sys.executable, "-c", SWEEP, "-m", *MODELS[model], *TINY, "accel=fused,graph+fused",
            "accel.strict=true,false", "task.repeats=1", "logger=plain", f"output.dir={tmp_path / 'out'}",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(("JOB", "END"))]
    assert lines == [*["JOB finds []"] * 4, "END finds []"], done.stdout + done.stderr
    assert done.returncode == 1, "the strict jobs fail"
