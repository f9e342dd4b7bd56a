"""What a graph gives back, and how callers get it. Source: graph spec sections 3.3 and 5.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor

from accel.graphs.buffers import Copies, Layout, graph_memory
from accel.graphs.tree import distinct_tensors, map_tensors

Outputs: TypeAlias = Literal["clone", "view"]


class Results:
    """The value that every replay writes anew.

    is_weight: tensors that are handed out themselves, as in eager. outputs: `clone` hands out copies
    that no later replay touches; `view` the graph's own tensors, which stay right until the next call
    of any graph in the same pool, that is of the same region, whatever its signature.
    """

    def __init__(self, value: Any, *, is_weight: Callable[[Tensor], bool], outputs: Outputs) -> None:
        self._value = value
        self.tensors = [tensor for tensor in distinct_tensors(value) if not is_weight(tensor)]
        self._copied = self.tensors if outputs == "clone" else []
        self._layouts = [Layout.of(tensor) for tensor in self._copied]
        self._copies = Copies(dict(enumerate(self._copied)))
        if outputs == "view":
            graph_memory.add(self, self.tensors)

    @property
    def copied_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._copied)

    def allocate(self) -> list[Tensor]:
        """Room for one `hand_out`. Raises: torch.OutOfMemoryError."""
        return [layout.empty() for layout in self._layouts]

    def hand_out(self, room: list[Tensor]) -> Any:
        """The value in containers of its own, copied into `room`. Enqueued, not waited for."""
        self._copies.store(room)
        own = {id(tensor): copy for tensor, copy in zip(self._copied, room, strict=True)}
        return map_tensors(self._value, lambda tensor: own.get(id(tensor), tensor))
