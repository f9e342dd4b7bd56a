"""FLUX.2 at tiny widths with graphs, on the backend that replays recorded operations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

import pipelines.pipeline
from accel.graphs.recording import RecordingBackend
from accel.record import Kind
from accel.runner import Runner
from pipelines.build import build
from tasks.config import compose

SETTINGS = (
    "device=cpu",
    "size=tiny",
    "prompt=a cat",
    "model.height=32",
    "model.width=32",
    "model.steps=2",
    "model.guidance=3.0",
    "model.prompt_cache_tokens=0",
)


@pytest.mark.parametrize(
    ("name", "variant", "policy"),
    [
        ("flux2_klein", "4b-base", ("accel=graph", "accel.loop=step")),
        ("flux2_klein", "4b-base", ("accel=graph", "accel.loop=chain")),
        ("flux2_klein", "4b-base", ("accel=graph", "accel.loop=whole")),
        ("flux2_klein", "4b-base", ("accel=segmented",)),
        ("flux2_dev", "dev", ("accel=graph",)),
    ],
)
def test_every_region_is_replayed_with_the_bits_of_eager(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, variant: str, policy: tuple[str, ...]
) -> None:
    Image.radial_gradient("L").save(tmp_path / "seen.png")
    settings = (
        f"model={name}",
        f"model.variant={variant}",
        f"model.images=[{tmp_path / 'seen.png'}]",
        *SETTINGS,
    )
    eager = build(compose("accel=eager", *settings))
    request = eager.request_from(compose(*settings))
    other = replace(request, seed=7, prompt="a dog")
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    graphed = build(compose(*policy, *settings))

    first = graphed.run(request)
    for served in (other, request):
        assert graphed.run(served).digests == eager.run(served).digests
    assert first.digests == eager.run(request).digests
    assert first.digests["vae.images"] != eager.run(other).digests["vae.images"]

    stages = [stage for stage in graphed.record.stages.values() if stage.outcomes]
    assert len(stages) == 4
    for stage in stages:
        assert {outcome.kind for outcome in stage.outcomes} == {Kind.CAPTURED, Kind.REPLAYED}
