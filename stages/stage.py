"""The contract between a pipeline and its stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from accel.fusion.mounting import Mount


@dataclass(frozen=True)
class Field:
    """One named value that stages hand on.

    shape: symbolic, e.g. "(1, L, 3072)"; empty for values that are not tensors.
    unit: dtype, unit and range in words, e.g. "bf16 tokens" or "rad, gripper 0..1".
    """

    name: str
    shape: str = ""
    unit: str = ""


class State:
    """The values of one request, written by stages in order. Never shared between requests."""

    def __init__(self, **values: Any) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            known = ", ".join(self._values) or "nothing"
            raise KeyError(f"no stage has written '{name}' yet; the state holds {known}") from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._values:
            raise KeyError(f"'{name}' is written twice in one request")
        self._values[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values


class Stage(ABC):
    """One step of a pipeline.

    `run` is ordinary Python: tokenising, drawing noise, loops. Methods marked with
    `accel.region.region` do the tensor work; a runner may replace them per instance.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[Field, ...]]
    writes: ClassVar[tuple[Field, ...]]

    @abstractmethod
    def run(self, state: State) -> None:
        """Read `reads` from the state and write every name in `writes`."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Modules whose weights the stage's regions use, by component name."""
        return {}

    def mounts(self, allowed: frozenset[str]) -> Sequence[Mount]:
        """Bind forwards with fusion sites on library modules of this stage.

        allowed: site names that may fuse here.
        """
        return ()

    def forget(self) -> None:
        """Drop what was computed from weights; called after weights change in place.

        Tensors that a module holds are computed again where they are: graphs read them by address.
        """
        return
