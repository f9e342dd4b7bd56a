"""The requests that `task=verify` derives from one configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from toy_pipeline import ToyPipeline, ToyRequest

from pipelines.flux3_action.settings import ObservationSource
from tasks.config import ROOT, RunConfig, compose
from tasks.request_facts import describe_request
from tasks.varied_requests import PROMPTS, varied_requests


class Noting(ToyPipeline):
    """Keeps the configurations it was asked for; requests are `width` wide, or have no width."""

    def __init__(self, width: int | None = 256) -> None:
        super().__init__()
        self.width = width
        self.configs: list[RunConfig] = []

    def request_from(self, config: RunConfig) -> Any:
        self.configs.append(config)
        request = super().request_from(config)
        return request if self.width is None else replace(request, width=self.width)


def test_the_first_request_is_the_configurations_own() -> None:
    config, arm = compose("seed=5", "prompt=hello"), Noting()
    (request,) = varied_requests(config, arm, 1)
    assert arm.configs == [config]
    assert request == ToyRequest(prompt="hello", seed=5, width=256)


def test_seeds_prompts_and_widths_change() -> None:
    config, arm = compose("seed=5"), Noting()
    requests = varied_requests(config, arm, 4)
    assert [request.seed for request in requests] == [5, 6, 7, 8]
    assert [config.prompt for config in arm.configs] == [*PROMPTS, PROMPTS[0]]
    assert [request.width for request in requests] == [256, 192, 256, 192]


def test_frames_of_an_episode_go_on_and_begin_again() -> None:
    frames = len(json.loads((ROOT / "data" / "panda_lift" / "episode.json").read_bytes())["frames"])
    arm = Noting()
    varied_requests(compose(f"observation.frame={frames - 1}"), arm, 3)
    assert [config.observation and config.observation.frame for config in arm.configs] == [frames - 1, 0, 1]


def test_seeds_stay_in_their_range() -> None:
    last = compose(f"seed={2**63 - 1}")
    assert [request.seed for request in varied_requests(last, Noting(), 2)] == [2**63 - 1, 0]


def test_observations_that_are_no_episode_stay_as_they_are() -> None:
    source = ObservationSource(npz="robot.npz")
    arm = Noting()
    varied_requests(replace(compose(), observation=source), arm, 2)
    assert [config.observation for config in arm.configs] == [source, source]


@pytest.mark.parametrize(("own", "other"), [(1024, 960), (192, 128), (128, 192), (64, 128), (16, 80)])
def test_the_other_width_is_legal_for_every_model(own: int, other: int) -> None:
    """LTX-2 in two stages takes multiples of 64, from 128."""
    _, request = varied_requests(compose(), Noting(own), 2)
    assert request.width == other


def test_a_request_is_described_by_what_tells_it_from_others() -> None:
    facts = describe_request(ToyRequest(prompt="p", seed=3, width=64))
    assert facts == {"seed": 3, "prompt": "p", "width": 64}
