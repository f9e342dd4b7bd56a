"""The whole pipeline at tiny widths with graphs, on the backend that replays recorded operations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import pipelines.pipeline
from accel.graphs.recording import RecordingBackend
from accel.record import Kind
from accel.runner import Runner
from pipelines.build import build
from tasks.config import compose

SETTINGS = ("device=cpu", "size=tiny", "model.steps=2", "model.caption_cache_tokens=0")


@pytest.mark.parametrize(
    "policy",
    [
        ("accel=graph", "accel.loop=step"),
        ("accel=graph", "accel.loop=chain"),
        ("accel=graph", "accel.loop=whole"),
        ("accel=segmented",),
    ],
    ids=" ".join,
)
def test_every_region_is_replayed_with_the_bits_of_eager(
    monkeypatch: pytest.MonkeyPatch, policy: tuple[str, ...]
) -> None:
    config = compose("accel=eager", *SETTINGS)
    eager = build(config)
    request = eager.request_from(config)
    other = replace(request, seed=7)
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    graphed = build(compose(*policy, *SETTINGS))

    first = graphed.run(request)
    for served in (other, request):
        assert graphed.run(served).digests == eager.run(served).digests
    assert first.digests == eager.run(request).digests

    stages = [stage for stage in graphed.record.stages.values() if stage.outcomes]
    assert len(stages) == 4
    for stage in stages:
        assert {outcome.kind for outcome in stage.outcomes} == {Kind.CAPTURED, Kind.REPLAYED}
    assert first.digests != eager.run(other).digests
