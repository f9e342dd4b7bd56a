"""Copies that keep a tensor's strides and alignment, and the fixed buffers that a graph reads.

Eager kernels are chosen by layout as well as by shape, so the buffers a graph reads, and the
results it hands out, have the layout that eager would have seen. Source: graph spec section 3.2.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accel.graphs.tree import misalignment

Tokens = Mapping[str, Hashable]


class Layout(NamedTuple):
    """All of a tensor but its content. offset: elements from an address that memory can start at."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        offset = misalignment(tensor) // tensor.element_size()
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, offset)

    def empty(self) -> Tensor:
        """A new uninitialised tensor."""
        shape, stride, dtype, device, offset = self
        if not offset:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return torch.empty(offset + extent, dtype=dtype, device=device).as_strided(shape, stride, offset)


def distinct_part(tensor: Tensor) -> Tensor:
    """The view that holds every element once: expanded dimensions are cut to size 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def clone_layout(tensor: Tensor) -> Tensor:
    """A copy with the same strides and misalignment."""
    copy = Layout.of(tensor).empty()
    distinct_part(copy).copy_(distinct_part(tensor))
    return copy


def storage_address(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage().data_ptr()


class Copies:
    """Copies between fixed tensors and others of the same layouts, one launch per dtype."""

    def __init__(self, fixed: Mapping[int, Tensor]) -> None:
        parts = {index: distinct_part(tensor) for index, tensor in fixed.items()}
        self._expanded = {index for index, part in parts.items() if part is not fixed[index]}
        groups: dict[torch.dtype, list[tuple[int, Tensor]]] = defaultdict(list)
        for index, part in parts.items():
            groups[part.dtype].append((index, part))
        self._groups = list(groups.values())

    def load(self, tensors: Sequence[Tensor], *, skipped: Collection[int] = ()) -> None:
        """Copy from the tensors of the same indices; one that is the fixed tensor itself is left alone."""
        for group in self._groups:
            pairs = [(part, self._part(tensors, index)) for index, part in group if index not in skipped]
            _copy([(part, source) for part, source in pairs if source is not part])

    def store(self, tensors: Sequence[Tensor]) -> None:
        """Copy to the tensors of the same indices."""
        for group in self._groups:
            _copy([(self._part(tensors, index), part) for index, part in group])

    def _part(self, tensors: Sequence[Tensor], index: int) -> Tensor:
        return distinct_part(tensors[index]) if index in self._expanded else tensors[index]


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """(target, source) of one dtype."""
    if len(pairs) == 1:
        target, source = pairs[0]
        target.copy_(source)
    elif pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class _Content(NamedTuple):
    """What a persistent buffer was filled from. tensor: gives `None` where the stamp says it all."""

    stamp: Hashable
    tensor: Callable[[], Tensor | None]


def _content(tensor: Tensor, names: tuple[str, ...], tokens: Tokens) -> _Content | None:
    """The content of an argument by those names; `None` if nothing tells when it changes."""
    if all(name in tokens for name in names):
        return _Content(tuple(tokens[name] for name in names), lambda: None)
    if tensor.is_inference() or tensor in graph_memory:
        return None
    return _Content((id(tensor), tensor._version, tensor.data_ptr()), weakref.ref(tensor))


class StaticInputs:
    """The fixed buffers that a graph reads, one per distinct tensor argument.

    persistent: index of a tensor -> the arguments that hold it, where all of them were declared to
    change rarely. Such a tensor is copied only when it is another object, was written to, or its
    token changed. Without a token, tensors without a version counter (made in inference mode) and
    results of graphs, which change uncounted, are copied every time.
    """

    def __init__(
        self, tensors: Sequence[Tensor], *, persistent: Mapping[int, tuple[str, ...]] | None = None
    ) -> None:
        # Ordinary tensors even in inference mode: their version counter shows writes.
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = [Layout.of(tensor).empty() for tensor in tensors]
        self._copies = Copies(dict(enumerate(self.buffers)))
        self._persistent = persistent or {}
        self._held: dict[int, _Content | None] = {}  # what persistent buffers were filled from
        self._exposed: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def fill(self, tensors: Sequence[Tensor], tokens: Tokens | None = None) -> None:
        """Copy the caller's tensors in. No synchronisation.

        tokens: argument name -> what changes whenever the argument's content does.
        """
        if self._exposed:
            tensors = self._untangled(tensors)
        contents = {
            index: _content(tensors[index], names, tokens or {}) for index, names in self._persistent.items()
        }
        held = {index: content for index, content in contents.items() if self._holds(index, content)}
        self._held = held  # until the copies of the others are made
        self._copies.load(tensors, skipped=held)
        self._held = contents

    def expose(self, outputs: Sequence[Tensor]) -> None:
        """Callers are handed `outputs` uncopied, so that buffers may come back as arguments."""
        own = {storage_address(buffer) for buffer in self.buffers}
        self._exposed = own & {storage_address(output) for output in outputs}

    def _holds(self, index: int, content: _Content | None) -> bool:
        """Whether the persistent buffer was filled from just this, and nobody else writes to it."""
        held = self._held.get(index)
        if content is None or held is None or storage_address(self.buffers[index]) in self._exposed:
            return False
        return held.stamp == content.stamp and held.tensor() is content.tensor()

    def versions(self) -> list[int]:
        """Grow when something writes into a buffer."""
        return [buffer._version for buffer in self.buffers]

    def _untangled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A buffer that comes back in another's place is copied before it is overwritten."""
        return [
            tensor
            if tensor is buffer or storage_address(tensor) not in self._exposed
            else clone_layout(tensor)
            for tensor, buffer in zip(tensors, self.buffers, strict=True)
        ]


class _GraphMemory:
    """Storages that replays write to, without a count, for as long as the graph lives."""

    def __init__(self) -> None:
        self._owners: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()

    def add(self, owner: object, tensors: Sequence[Tensor]) -> None:
        self._owners.update({storage_address(tensor): owner for tensor in tensors})

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_address(tensor) in self._owners


graph_memory = _GraphMemory()
