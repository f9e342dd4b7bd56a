"""A function behind a WholeGraph on CUDA, for the tests beside this file."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel.graphs.cuda import CudaBackend
from accel.graphs.modules import ModuleWatch
from accel.graphs.results import Outputs
from accel.graphs.whole import WholeGraph
from accel.policy import StagePolicy
from accel.record import Kind, Outcome

MIB = 1 << 20


@contextmanager
def clean_cuda() -> Iterator[None]:
    """Tensors are made on the GPU, without grad; afterwards nothing is left."""
    with torch.no_grad(), torch.device("cuda"):
        yield
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


class Harness:
    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        modules: Callable[[], Mapping[str, nn.Module]] = dict,
        max_entries: int = 8,
        on_full: Any = "eager",
        memory_budget_mb: int | None = None,
        outputs: Outputs = "clone",
    ) -> None:
        backend = CudaBackend(torch.device("cuda"))
        policy = StagePolicy(
            enable_cuda_graph=True,
            graph_mode="full",
            max_entries=max_entries,
            max_segments=1,
            on_full=on_full,
            memory_budget_mb=memory_budget_mb,
            fused={},
        )
        watch = ModuleWatch(modules, backend.device)
        self.graph = WholeGraph(
            fn,
            name="toy.f",
            backend=backend,
            watch=watch,
            policy=policy,
            fused=frozenset(),
            outputs=outputs,
        )
        self.outcomes: list[Outcome] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value, outcome = self.graph.call(args, kwargs)
        self.outcomes.append(outcome)
        return value

    @property
    def last(self) -> Outcome:
        return self.outcomes[-1]

    def count(self, kind: Kind) -> int:
        return sum(outcome.kind is kind for outcome in self.outcomes)


def allocator_noise() -> None:
    """Reuse freed memory for NaN, so that a graph which reads freed blocks shows."""
    for size in (1000, 4 * MIB):
        torch.full((size,), float("nan"))
