"""The function that is bound on a block: the new forward while the block is as it was, else the stock one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel.forward_hooks import FORWARD_HOOK_SLOTS
from accel.fusion.mounting.block_forward import BlockForward, part_at
from accel.fusion.scope import current_scope
from accel.record import Reason, SiteOutcome


def bound_forward(block: nn.Module, fused: BlockForward) -> Callable[..., Any]:
    """A function of (self, *args, **kwargs) for the block's `forward`.

    Where it leaves a call to the stock forward, the fusion scope is told so for every site of `fused`.
    """
    stock = fused.block.forward
    wiring = _Wiring(block, fused)

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A copy of the block has wiring of its own, and a compiler is to see plain expressions.
        if self is not block or torch.compiler.is_compiling() or not _may_fuse(fused):
            return stock(self, *args, **kwargs)
        if not wiring.is_intact():
            _tell(fused, Reason.UNSUPPORTED_MODULE, "hooks, processor or projections changed after mounting")
            return stock(self, *args, **kwargs)
        value = fused.forward(self, *args, **kwargs)
        if value is NotImplemented:
            _tell(fused, Reason.UNSUPPORTED_INPUT, f"{fused.name} is not mounted for such arguments")
            return stock(self, *args, **kwargs)
        return value

    return forward


class _Wiring:
    """What holds a block together, as it was at mount: checked at every call, so only by identity."""

    def __init__(self, block: nn.Module, fused: BlockForward) -> None:
        self._facts: list[tuple[dict[str, Any], str, Any]] = []
        self._hooks: list[Any] = []
        for path in fused.parts:
            parent, _, attribute = path.rpartition(".")
            owner, part = part_at(block, parent) if parent else block, part_at(block, path)
            held_by = owner._modules if attribute in owner._modules else vars(owner)
            self._facts.append((held_by, attribute, part))
            if isinstance(part, nn.Module):
                settings = vars(part)
                self._facts += [
                    (settings, key, settings.get(key)) for key in ("forward", "fused_projections")
                ]
                self._hooks += [getattr(part, slot) for slot in FORWARD_HOOK_SLOTS]

    def is_intact(self) -> bool:
        return not any(self._hooks) and all(held.get(key) is value for held, key, value in self._facts)


def _may_fuse(fused: BlockForward) -> bool:
    """Eager callers of the same model get the stock forward itself, not the same bits in other words."""
    scope = current_scope()
    return scope is not None and not scope.allowed.isdisjoint(fused.sites)


def _tell(fused: BlockForward, reason: Reason, detail: str) -> None:
    scope = current_scope()
    if scope is not None:
        for site in sorted(fused.sites & scope.allowed):
            scope.observe(SiteOutcome(site, False, reason, detail))
