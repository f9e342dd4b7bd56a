"""Unlike requests derived from one configuration, so that a comparison meets more than one signature."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.flux3_action.settings import ObservationSource
from tasks.arms import Arm
from tasks.config import RunConfig

# `None` is the prompt of the configuration.
PROMPTS = (None, "put the red cube into the bowl that stands beside the window, without haste", "go")
_SEEDS = 2**63
_WIDTH_STEP = 64  # pixels; every image and video model can go on by it, LTX-2 in two stages by no less


def varied_requests(config: RunConfig, arm: Arm, count: int) -> list[Any]:
    """`count` requests; the first is the configuration's own.

    The others have seeds of their own, longer and shorter prompts, later frames of a recorded episode and,
    every other one, another width where the model has one.
    Raises: ConfigError, ObservationError as `Pipeline.request_from`.
    """
    return [_request(config, arm, number) for number in range(count)]


def _request(config: RunConfig, arm: Arm, number: int) -> Any:
    if number == 0:
        return arm.request_from(config)
    own = replace(
        config,
        seed=((config.seed or 0) + number) % _SEEDS,
        prompt=PROMPTS[number % len(PROMPTS)] or config.prompt,
        observation=config.observation and _later(config.observation, number),
    )
    request = arm.request_from(own)
    return _other_width(request) if number % 2 and hasattr(request, "width") else request


def _later(source: ObservationSource, frames: int) -> ObservationSource:
    """The source that many frames on; after the last frame comes the first."""
    if source.episode is None:
        return source
    recorded = json.loads((Path(source.episode) / "episode.json").read_bytes())["frames"]
    return replace(source, frame=(source.frame + frames) % len(recorded))


def _other_width(request: Any) -> Any:
    narrower = request.width - _WIDTH_STEP
    width = narrower if narrower > _WIDTH_STEP else request.width + _WIDTH_STEP
    return dataclasses.replace(request, width=width)
