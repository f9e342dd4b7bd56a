"""Mounting: judge, compare with the stock forward, bind; and undo.

The comparison runs outside of any fusion scope: it proves that the forward is the stock computation in
other words. That kernels give the bits of these words is for each site's gate to prove, with true shapes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from accel.errors import SamebitError
from accel.fusion.compare import Mismatch, first_mismatch
from accel.fusion.mounting.block_forward import BlockForward, Draw
from accel.fusion.mounting.bound import bound_forward
from accel.fusion.mounting.refusal import Refusal, refusal_of
from accel.record import MountReport, Reason

_log = logging.getLogger("samebit")


@dataclass
class _Mounted:
    """What is known of a forward that was bound: of which block, and how many mounts rely on it.

    Pipelines may share a model.
    """

    block: weakref.ref[nn.Module]
    fused: BlockForward
    users: int = 0


# By bound function, and gone with it. No attribute of the function: hooks that wrap it copy those.
_mounted_by: weakref.WeakKeyDictionary[Callable[..., Any], _Mounted] = weakref.WeakKeyDictionary()


def is_mounted(block: nn.Module) -> bool:
    """Whether the block's `forward` is one that was mounted, with nothing around it."""
    return _found_on(block) is not None


def _bind(block: nn.Module, fused: BlockForward) -> None:
    function = bound_forward(block, fused)
    _mounted_by[function] = _Mounted(weakref.ref(block), fused)
    vars(block)["forward"] = MethodType(function, block)


def _found_on(block: nn.Module) -> _Mounted | None:
    forward = vars(block).get("forward")
    return _mounted_by.get(forward.__func__) if isinstance(forward, MethodType) else None


class Mount:
    """One class of blocks, mounted or refused, and the way back."""

    def __init__(self, report: MountReport, blocks: Sequence[nn.Module] = ()) -> None:
        self.report = report
        self._blocks = list(blocks)
        for block in self._blocks:
            _mounted_on(block).users += 1

    def unmount(self) -> None:
        """Give every block its stock forward back, unless another mount of it needs the new one.

        Again, or where nothing was mounted: no change.
        Raises: SamebitError if something replaced a forward since; nothing is changed then.
        """
        for mounted in list(map(_mounted_on, self._blocks)):
            mounted.users -= 1
        for block in self._blocks:
            if not _mounted_on(block).users:
                del vars(block)["forward"]
        self._blocks.clear()


def mount(model: nn.Module, forwards: Sequence[BlockForward], *, allowed: frozenset[str]) -> list[Mount]:
    """Bind every forward, of which a site is allowed, on its blocks in `model`; one `Mount` a forward.

    The forwards take effect inside a fusion scope that allows a site of theirs. Blocks that can't be served
    keep their stock forward, and the report says why.
    allowed: site names that may fuse in the stage that runs the model. Waits for the device.
    Raises: what the device raises, out of memory included; nothing stays mounted then.
    """
    mounts = []
    with ExitStack() as undo:
        for fused in forwards:
            mounts.append(_mount(model, fused, allowed))
            undo.callback(mounts[-1].unmount)
        undo.pop_all()
    return mounts


def _mount(model: nn.Module, fused: BlockForward, allowed: frozenset[str]) -> Mount:
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, fused.block)}
    if allowed.isdisjoint(fused.sites):
        return _refused(blocks, fused, Refusal(Reason.DISABLED, "none of its sites is allowed"))
    for block in blocks.values():
        _drop_copied(block)
    if not blocks or not all(_is_bound(block, fused) for block in blocks.values()):
        refusal = refusal_of(model, blocks, fused) or _first_difference(blocks, fused)
        if refusal is not None:
            _log.warning("%s keeps its stock forward (%s): %s", fused.name, *refusal)
            return _refused(blocks, fused, refusal)
        for block in blocks.values():
            _bind(block, fused)
    return Mount(MountReport(fused.name, len(blocks), mounted=True), list(blocks.values()))


def _is_bound(block: nn.Module, fused: BlockForward) -> bool:
    mounted = _found_on(block)
    return mounted is not None and mounted.fused == fused


def _drop_copied(block: nn.Module) -> None:
    """A copy of a mounted block took the forward along, which is stock there and keeps the original alive."""
    mounted = _found_on(block)
    if mounted is not None and mounted.block() is not block:
        del vars(block)["forward"]


def _mounted_on(block: nn.Module) -> _Mounted:
    """Raises: SamebitError if something replaced the forward after mounting."""
    mounted = _found_on(block)
    if mounted is None:
        name = type(block).__name__
        raise SamebitError(f"{name}.forward was replaced after mounting; remove that hook, then unmount")
    return mounted


def _refused(blocks: Mapping[str, nn.Module], fused: BlockForward, refusal: Refusal) -> Mount:
    return Mount(MountReport(fused.name, len(blocks), False, refusal.reason, refusal.detail))


@torch.inference_mode()
def _first_difference(blocks: Mapping[str, nn.Module], fused: BlockForward) -> Refusal | None:
    """Stock against new forward on few random tokens, every block with its own weights."""
    for name, block in blocks.items():
        try:
            mismatch = _first_mismatch(block, fused)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            return Refusal(Reason.UNSUPPORTED_MODULE, f"{name}: {type(error).__name__}: {error}")
        if mismatch is not None:
            return Refusal(Reason.MISMATCH, f"{name}: {mismatch}")
    return None


def _first_mismatch(block: nn.Module, fused: BlockForward) -> Mismatch | None:
    for example in fused.examples(block, Draw(block)):
        expected = fused.block.forward(block, **example)
        mismatch = first_mismatch(expected, fused.forward(block, **example))
        if mismatch is not None:
            return mismatch
    return None
