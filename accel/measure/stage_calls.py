"""Watching the stages of a pipeline from outside, for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol


class WatchedStage(Protocol):
    """What watching needs of a stage; `stages.stage.Stage` has it."""

    @property
    def name(self) -> str: ...


Around = Callable[[str, Callable[[], None]], None]
"""Called as `around(stage name, call)`; it runs `call()` once."""


@contextmanager
def around_stages(stages: Sequence[WatchedStage], around: Around) -> Iterator[None]:
    """Inside the block every `stage.run(state)` goes through `around`; outside it costs nothing."""
    try:
        for stage in stages:
            vars(stage)["run"] = partial(_watched, type(stage).run, stage, around)  # type: ignore[attr-defined]
        yield
    finally:
        for stage in stages:
            vars(stage).pop("run", None)


def _watched(run: Callable[..., None], stage: WatchedStage, around: Around, *args: Any) -> None:
    around(stage.name, partial(run, stage, *args))
