"""What a pipeline is made of, as far as it is known before memory is taken for weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from pipelines.progress import Progress

TokenizerT = TypeVar("TokenizerT")


class Build(Protocol):
    """Makes and fills all modules, by component name; see `pipelines.module_building.build_modules`."""

    def __call__(
        self,
        *,
        check: Callable[[Mapping[str, nn.Module]], None],
        working_memory: Callable[[Mapping[str, nn.Module]], Mapping[str, int]] = ...,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
    ) -> dict[str, nn.Module]: ...


@dataclass(frozen=True, kw_only=True)
class ComponentSource(Generic[TokenizerT]):
    """A diffusers folder, or seeded random numbers. scheduler: of diffusers.

    description: where the weights come from, for the run header.
    """

    scheduler: Any
    tokenizer: TokenizerT
    build: Build
    description: str
