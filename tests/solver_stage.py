"""A stage whose loop changes its form, for tests of loops on the recording backend and on CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel.loops import iterate
from accel.region import loop_body, region


@dataclass(frozen=True)
class Carry:
    x: Tensor
    history: tuple[Tensor, ...] = ()
    start: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """remember: how many older values the step's result keeps."""

    scale: Tensor
    remember: int


class Solver:
    """A stage whose loop remembers more and more, up to two values, and nothing at the end."""

    name = "denoising"

    def __init__(self, width: int = 4) -> None:
        self.net = nn.Linear(width, width, bias=False).requires_grad_(False).eval()

    def modules(self) -> Mapping[str, nn.Module]:
        return {"net": self.net}

    def mounts(self, allowed: frozenset[str]) -> tuple[()]:
        return ()

    def run(
        self, x: Tensor, steps: Sequence[Step], shared: Tensor, *, gain: float = 1.0, **options: Any
    ) -> Carry:
        return iterate(self.advance, Carry(x), steps, shared, gain=gain, **options)

    @loop_body("whole")
    def advance(self, carry: Carry, step: Step, shared: Tensor, *, gain: float) -> Carry:
        x = self.net(carry.x) * step.scale + gain * shared
        for older in carry.history:
            x = x + 0.5 * older
        if step.remember == 0:
            return Carry(x)
        # The history moves on by one, and the start is the old carry itself.
        return Carry(x, (x * 2, *carry.history[:1])[: step.remember], carry.x)

    @region
    def decode(self, x: Tensor) -> Tensor:
        """A region in which the loop runs."""
        steps = (Step(x.mean(), 1), Step(x.sum(), 1))
        return self.run(x, steps, x).x


def unbound(stage: Solver) -> Solver:
    """One with the same weights that no runner was told of."""
    twin = type(stage)()
    twin.net = stage.net
    return twin


def steps_that_remember(scales: Sequence[Tensor]) -> tuple[Step, ...]:
    """First, second, some alike, last; the last forgets."""
    remember = [*(min(i + 1, 2) for i in range(len(scales) - 1)), 0]
    return tuple(Step(scale, n) for scale, n in zip(scales, remember, strict=True))


def same(a: Carry, b: Carry) -> bool:
    tensors = [[c.x, *c.history, *([] if c.start is None else [c.start])] for c in (a, b)]
    return len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))
