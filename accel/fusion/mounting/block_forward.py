"""The description of a forward that stands in for the stock one of a class of blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accel.fusion.mounting.fingerprint import Code, Fingerprint


class Draw:
    """Draws random inputs on the device of a module, the same at every mount."""

    def __init__(self, module: nn.Module) -> None:
        weight = next(module.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        # The global generators belong to the user.
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed. dtype: by default that of the module's weights."""
        drawn = torch.randn(shape, generator=self._generator, device="cpu", dtype=torch.float32)
        return drawn.to(self._device, dtype or self._dtype)


@dataclass(frozen=True, kw_only=True)
class BlockForward:
    """block: class whose instances get the forward.

    forward: takes the block and what `block.forward` takes, returns what that returns, bit for bit. It
        may return `NotImplemented` before it did anything: the stock forward runs this call.
    sites: names of the fusion sites it calls, and of the smaller ones that those fall back to.
    parts: attribute path -> classes allowed there, of all that the forward does itself instead of
        calling it. What it calls as a module (projections, say) is not listed and may be anything.
    functions: library functions it does itself.
    known: qualified name -> fingerprint, of the block, parts and functions. Classes of torch need none.
    refuses: what about an instance the forward does not cover, in words; empty if it does.
    examples: keyword arguments of calls with few tokens, on which both forwards are compared at mount.
    """

    block: type[nn.Module]
    forward: Callable[..., Any]
    sites: frozenset[str]
    parts: Mapping[str, tuple[type, ...]]
    functions: tuple[Callable[..., Any], ...] = ()
    known: Mapping[str, Fingerprint] = field(repr=False)
    refuses: Callable[[Any], str] = lambda block: ""
    examples: Callable[[Any, Draw], Sequence[Mapping[str, Any]]]

    @property
    def name(self) -> str:
        return self.block.__name__

    @property
    def code(self) -> tuple[Code, ...]:
        """Everything whose source must be as it was, each once."""
        classes = {self.block: None} | {each: None for allowed in self.parts.values() for each in allowed}
        library = [each for each in classes if each.__module__.split(".")[0] != "torch"]
        return (*library, *self.functions)


def part_at(block: nn.Module, path: str) -> Any:
    """The attribute at a dotted path. Raises: AttributeError."""
    return functools.reduce(getattr, path.split("."), block)
