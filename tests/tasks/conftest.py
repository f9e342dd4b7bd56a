from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_pipeline import CONFIG, FakePipeline, FakeRequest

from tasks import run
from tasks.config import RunConfig


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Run the task on a fake pipeline, in tmp_path."""

    def start(pipeline: FakePipeline, config: RunConfig = CONFIG, *, folder: Path = tmp_path) -> None:
        monkeypatch.setattr(run, "load", lambda config, *, progress: (pipeline, FakeRequest()))
        run.main(config, folder=folder)

    return start
