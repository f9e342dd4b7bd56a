from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_pipeline import CONFIG, FakePipeline

from tasks import run
from tasks.config import RunConfig


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Signals act here and in new processes, also where `nohup` or a shell's `&` has them ignored."""
    default = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    inherited = {number: signal.signal(number, handler) for number, handler in default.items()}
    yield
    for number, handler in inherited.items():
        signal.signal(number, handler)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Run the task on a fake pipeline, in tmp_path."""

    def start(pipeline: FakePipeline, config: RunConfig = CONFIG, *, folder: Path = tmp_path) -> None:
        monkeypatch.setattr(run, "load", lambda config, *, progress: (pipeline, "request"))
        run.main(config, folder=folder)

    return start
