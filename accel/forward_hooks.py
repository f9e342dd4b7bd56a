"""Where a module keeps hooks that run around its forward, which graphs and fused forwards would pass by."""

from __future__ import annotations

from torch import nn

FORWARD_HOOK_SLOTS = ("_forward_hooks", "_forward_pre_hooks")


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on the module itself; those on its submodules are theirs."""
    return any(getattr(module, slot) for slot in FORWARD_HOOK_SLOTS)
