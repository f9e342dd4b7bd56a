"""A function behind a WholeGraph on the recording backend, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from accel.graphs.modules import ModuleWatch
from accel.graphs.recording import RecordingBackend
from accel.graphs.whole import WholeGraph
from accel.policy import AccelPolicy

CPU = torch.device("cpu")
X = torch.tensor([[1.0, 2, 3], [4, 5, 6]])


class Harness:
    """A function behind a WholeGraph; calling it keeps the last outcome.

    options: further arguments of WholeGraph. policy: fields of the policy.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        modules: Callable[[], Mapping[str, nn.Module]] = dict,
        backend: RecordingBackend | None = None,
        fail_at: int | None = None,
        options: Mapping[str, Any] | None = None,
        **policy: Any,
    ) -> None:
        settings: dict[str, Any] = dict(max_entries=8, on_full="eager") | policy
        common = AccelPolicy(
            name="test", enable_cuda_graph=True, graph_mode="full", max_segments=1, strict=False,
            fused={}, stages={}, **settings,
        )  # fmt: skip
        self.backend = backend or RecordingBackend(fail_at=fail_at)
        self.graph = WholeGraph(
            fn,
            name="toy.f",
            backend=self.backend,
            watch=ModuleWatch(modules, CPU),
            policy=common.for_stage("toy"),
            fused=frozenset(),
            **(options or {}),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value, self.outcome = self.graph.call(args, kwargs)
        return value

    def vouched(self, *args: Any, sealed: Any = None, tokens: Any = None) -> Any:
        """A call with a key or tokens of the caller."""
        value, self.outcome = self.graph.call(args, {}, sealed=sealed, tokens=tokens)
        return value
