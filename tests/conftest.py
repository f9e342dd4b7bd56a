"""Golden tensors of FLUX 3 Action, read once per session; how workers share the machine; signals."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accel.policy import AccelPolicy

GOLDEN = Path(__file__).parent / "golden" / "flux3"


def pytest_configure(config: pytest.Config) -> None:
    """Workers that run side by side take one core each."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Signals act here and in new processes, also where `nohup`, `trap` or a shell's `&` has them ignored."""
    default = dict.fromkeys((signal.SIGHUP, signal.SIGTERM), signal.SIG_DFL)
    inherited = {number: signal.signal(number, handler) for number, handler in default.items()}
    inherited[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in inherited.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Tensor]]:
    """File name relative to the golden folder -> its tensors, by name. Not to be written to."""
    return cache(lambda file: load_file(GOLDEN / file))


@pytest.fixture(scope="session")
def golden_case() -> Callable[[str], dict[str, Any]]:
    """Case name -> its entry of the index: kind, file, config, inputs, outputs, tol."""
    index = json.loads((GOLDEN / "index.json").read_text())
    cases = {case["name"]: case for case in index["cases"]}
    return cases.__getitem__


@pytest.fixture(scope="session")
def golden_json() -> Callable[[str], Any]:
    """JSON file name relative to the golden folder -> its content."""
    return cache(lambda file: json.loads((GOLDEN / file).read_text()))


@pytest.fixture(scope="session")
def eager_policy() -> AccelPolicy:
    """No graphs, no fused kernels."""
    return AccelPolicy(
        name="eager",
        enable_cuda_graph=False,
        graph_mode="full",
        max_entries=4,
        max_segments=512,
        on_full="eager",
        strict=False,
        fused={},
        stages={},
    )
