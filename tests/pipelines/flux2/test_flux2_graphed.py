"""FLUX.2 at tiny widths with graphs, on the backend that replays recorded operations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import pipelines.pipeline
from accel.graphs.recording import RecordingBackend
from accel.record import Kind, Reason
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


@pytest.mark.parametrize(
    "change", [{"height": 48}, {"guidance": 1.0}, {"images": 2}, {"prompt": "word " * 600}], ids=str
)
def test_a_warm_up_of_true_shapes_serves_every_prompt(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """A prompt that fills all tokens has no padding to mask, so that it is of another shape."""
    settings = ("model=flux2_klein", "model.variant=4b-base", *SETTINGS)
    eager = build(compose("accel=eager", *settings))
    request = eager.request_from(compose(*settings))
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    graphed = build(compose("accel=graph", "accel.capture=explicit", *settings))
    graphed.warm_up([request])
    graphed.new_record()

    def kinds() -> set[tuple[Kind, Reason | None]]:
        stages = graphed.record.stages.values()
        return {(outcome.kind, outcome.reason) for stage in stages for outcome in stage.outcomes}

    for prompt in ("", "a much longer prompt " * 10):
        served = replace(request, prompt=prompt, seed=9)
        assert graphed.run(served).digests == eager.run(served).digests
    assert kinds() == {(Kind.REPLAYED, None)}

    other = replace(request, **change)
    assert graphed.run(other).digests == eager.run(other).digests
    assert kinds() == {(Kind.REPLAYED, None), (Kind.EAGER, Reason.NOT_WARMED)}
