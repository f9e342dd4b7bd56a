"""Memory for tensors that cross breaks, shared by the breaks of one graph. Source: graph spec section 4.2.

Without it everything that a break reads or returns stays allocated for the life of the graph, once per
break: what attention breaks read and return in a video transformer would take gigabytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accel.graphs.buffers import Layout, clone_layout, distinct_part
from accel.graphs.tree import map_tensors

_SLOTS = 2  # breaks take turns, so that one may still be read while the next one is filled


class BridgeArena:
    """Slots for the arguments of breaks that keep none of them, and buffers for results.

    All reuse is ordered on the one stream that runs segments and breaks.
    """

    def __init__(self, *, on_host: Callable[[Tensor], bool]) -> None:
        self._on_host = on_host
        self._turn = 0
        self._slots: dict[tuple[int, int, Layout], Tensor] = {}
        self._results: dict[Layout, list[_Lent]] = {}

    @property
    def nbytes(self) -> int:
        lent = [each.buffer for group in self._results.values() for each in group]
        return sum(tensor.nbytes for tensor in (*self._slots.values(), *lent))

    def stage(self, arguments: Any) -> Any:
        """The arguments with copies of their device tensors, for the break to read.

        Called while the segment before the break is recorded, of which the copies become part. The
        originals need not outlive that segment. Weights are not copied.
        """
        self._turn += 1
        copies: dict[int, Tensor] = {}
        used: Counter[Layout] = Counter()

        def copy(tensor: Tensor) -> Tensor:
            if isinstance(tensor, nn.Parameter) or self._on_host(tensor):
                return tensor
            if id(tensor) not in copies:
                layout = Layout.of(tensor)
                used[layout] += 1
                copies[id(tensor)] = self._filled((self._turn % _SLOTS, used[layout], layout), tensor)
            return copies[id(tensor)]

        return map_tensors(arguments, copy)

    def result(self, tensor: Tensor) -> Tensor:
        """A copy at a fixed address, for the segments after a break.

        Its memory goes to a later result of the same layout once nothing but the breaks that wrote there
        holds on to it: whatever was recorded to read it comes before what is recorded from then on.
        """
        group = self._results.setdefault(Layout.of(tensor), [])
        lent = next((each for each in group if each.is_free()), None)
        if lent is None:
            with torch.inference_mode(False), torch.no_grad():
                lent = _Lent(clone_layout(tensor))
            group.append(lent)
        else:
            distinct_part(lent.buffer).copy_(distinct_part(tensor))
        return lent.out()

    def _filled(self, key: tuple[int, int, Layout], tensor: Tensor) -> Tensor:
        if key not in self._slots:
            with torch.inference_mode(False), torch.no_grad():
                self._slots[key] = key[-1].empty()
        slot = self._slots[key]
        distinct_part(slot).copy_(distinct_part(tensor))
        return slot


class _Lent:
    """A buffer and how many of its holders are known: this object, and the breaks that write there."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._known = _holders(buffer)

    def is_free(self) -> bool:
        return _holders(self.buffer) == self._known

    def out(self) -> Tensor:
        """Another tensor on the buffer; the break that gets it keeps one more."""
        self._known += 1
        return self.buffer.detach()


def _holders(tensor: Tensor) -> int:
    """Tensors that share the memory, views included."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
