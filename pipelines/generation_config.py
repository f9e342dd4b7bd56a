"""What a pipeline that goes from a prompt to media reads of the configuration."""

from __future__ import annotations

from typing import Protocol, TypeVar

from accel.policy import AccelPolicy
from pipelines.weights_config import WeightsConfig

SettingsT = TypeVar("SettingsT", covariant=True)


class GenerationConfig(Protocol[SettingsT]):
    """A part of `tasks.config.RunConfig`. SettingsT: type of the `model` node."""

    @property
    def model(self) -> SettingsT: ...
    @property
    def accel(self) -> AccelPolicy: ...
    @property
    def weights(self) -> WeightsConfig: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def prompt(self) -> str | None: ...
