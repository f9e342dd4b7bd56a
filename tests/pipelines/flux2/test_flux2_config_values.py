"""Values of config.json that would end a FLUX.2 request in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from json_files import changed
from tiny_flux2 import CPU, make_components

import pipelines.flux2.weights
from accel.errors import CheckpointError
from pipelines.flux2.config import flux2_config
from pipelines.flux2.weights import load_flux2
from pipelines.weights_config import WeightsConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What diffusers saves of klein. Every test restores what it changes."""
    folder = tmp_path_factory.mktemp("klein")
    make_components("4b", torch.float32)[1].save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("file", "key", "value", "expected"),
    [
        ("scheduler/scheduler_config.json", "shift_terminal", "x", "float"),
        ("scheduler/scheduler_config.json", "num_train_timesteps", None, "int"),
        ("scheduler/scheduler_config.json", "use_dynamic_shifting", "yes", "bool"),
        ("transformer/config.json", "eps", None, "float"),
        ("transformer/config.json", "rope_theta", "2000", "int"),
        ("transformer/config.json", "axes_dims_rope", 4, "tuple[int, ...]"),
        ("vae/config.json", "batch_norm_eps", None, "float"),
        ("vae/config.json", "patch_size", [2], "tuple[int, int]"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, key: str, value: object, expected: str
) -> None:
    monkeypatch.setattr(
        pipelines.flux2.weights, "flux2_config", lambda name, size: flux2_config(name, "tiny")
    )
    path = folder / file
    with changed(path, **{key: value}), pytest.raises(CheckpointError) as refused:
        load_flux2(
            weights=WeightsConfig(kind="local", path=str(folder)),
            variant="4b",
            size="full",
            device=CPU,
            dtype=torch.float32,
        )
    message = str(refused.value)
    assert message.startswith(f"{path}: '{key}' is {json.dumps(value)}, but ")
    assert f" takes {expected}. " in message
