"""The whole pipeline at tiny widths with graphs, on the backend that replays recorded operations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import pipelines.pipeline
from accel.graphs.recording import RecordingBackend
from accel.record import Kind
from accel.runner import Runner
from pipelines.build import build
from tasks.config import compose

SETTINGS = ("device=cpu", "size=tiny", "model.steps=2", "model.caption_cache_tokens=0")


@pytest.fixture(scope="module")
def eager() -> list[tuple[Any, dict[str, str]]]:
    """Two requests and the digests of what eager makes of them."""
    config = compose("accel=eager", *SETTINGS)
    pipeline = build(config)
    request = pipeline.request_from(config)
    return [(each, pipeline.run(each).digests) for each in (request, replace(request, seed=7))]


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
    monkeypatch: pytest.MonkeyPatch, policy: tuple[str, ...], eager: list[tuple[Any, dict[str, str]]]
) -> None:
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    graphed = build(compose(*policy, *SETTINGS))

    one, other = eager
    assert one[1] != other[1]
    results = [(graphed.run(request), digests) for request, digests in (one, other, one)]
    for result, digests in results:  # when all have run: later requests must leave earlier results alone
        assert result.digests == digests

    stages = [stage for stage in graphed.record.stages.values() if stage.outcomes]
    assert len(stages) == 4
    for stage in stages:
        assert {outcome.kind for outcome in stage.outcomes} == {Kind.CAPTURED, Kind.REPLAYED}
