"""Settings of weights that contradict each other or would do nothing."""

from __future__ import annotations

import pytest

from accel.errors import ConfigError
from pipelines.diffusers_folder import DiffusersFolder
from pipelines.weights_config import WeightsConfig
from tasks.config import compose


@pytest.mark.parametrize("model", ["flux3_action", "flux2_klein", "ltx2"])
def test_tiny_weights_of_a_folder_are_refused_before_anything_is_read(model: str) -> None:
    with pytest.raises(ConfigError, match=r"size=tiny is for weights=synthetic; weights=local .*size=auto"):
        compose(f"model={model}", "weights=local", "weights.path=nowhere", "size=tiny")


@pytest.mark.parametrize("kind", ["local", "hub"])
def test_checksums_that_a_diffusers_folder_lacks_cannot_be_left_out(kind: str) -> None:
    weights = WeightsConfig(kind=kind, path="nowhere", repo="owner/name", verify_checksums=False)
    with pytest.raises(ConfigError, match=r"weights\.verify_checksums=false has no effect.*Drop it"):
        DiffusersFolder.open(weights, pipelines=())
