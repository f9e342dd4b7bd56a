"""Savings: passes of a network that stage code leaves out or runs together.

The mathematics stay the same and roundings move, so that no gate can prove them: each is off unless the
policy allows it by name, and a stage that takes one is of the tier `moved_rounding`.
Source: fusion spec sections 1 and 3.5.
"""

from __future__ import annotations

import torch

from accel.fusion.scope import current_scope
from accel.record import Reason, SiteOutcome


def takes(name: str, *, unless: str = "") -> bool:
    """Whether the region that asks is to take the saving: the current fusion scope allows it.

    name: one of `accel.site_names.SAVING_NAMES`. unless: why it can't be taken here, in words; empty where
    it can. What comes of an allowed saving is counted as the call of a fusion site is.
    """
    # A compiler cannot trace a context variable; policies that compile allow no saving.
    if torch.compiler.is_compiling() or (scope := current_scope()) is None or name not in scope.allowed:
        return False
    if unless:
        scope.observe(SiteOutcome(name, fused=False, reason=Reason.UNSUPPORTED_INPUT, detail=unless))
        return False
    scope.observe(SiteOutcome(name, fused=True))
    return True
