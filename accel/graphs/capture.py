"""From a call to a proven graph: warm up on fixed copies of the inputs, capture, compare with eager.

Source: graph spec sections 3.4, 3.5 and 8.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.fusion.compare import first_mismatch
from accel.graphs import canary
from accel.graphs.backend import CapturedGraph, GraphBackend
from accel.graphs.buffers import StaticInputs
from accel.graphs.containment import autocast_cache_off, collector_paused
from accel.graphs.signature import Signature
from accel.graphs.tree import UnsupportedValueError, argument_name, flatten, map_tensors, tensor_names
from accel.record import Kind, Outcome, Reason

# They create library handles and workspaces, load kernels, and let fusion gates verify what is new.
WARM_UPS = 2


class RunEagerError(Exception):
    """Ends the attempt to serve a call from a graph."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.outcome = Outcome(Kind.EAGER, reason, detail)


@dataclass(frozen=True)
class Entry:
    """A graph and the buffers it reads."""

    inputs: StaticInputs
    graph: CapturedGraph


def capture(
    fn: Callable[..., Any],
    signature: Signature,
    bound: inspect.BoundArguments,
    tensors: list[Tensor],
    *,
    backend: GraphBackend,
    pool: Any,
    rng: Tensor,
) -> Entry:
    """Capture one call of `fn`. The caller's tensors are only read.

    bound: the call's arguments. tensors: their distinct tensors in signature order. rng: generator state
    that every run starts from; the caller restores it.
    Raises: RunEagerError if `fn` can't be served exactly; CaptureFailedError; what `fn` itself raises.
    """
    inputs, others = StaticInputs(tensors), StaticInputs(tensors)

    def run(buffers: list[Tensor]) -> Any:
        fixed = {id(tensor): buffer for tensor, buffer in zip(tensors, buffers, strict=True)}
        # Fresh containers every time, in case the region changes them.
        arguments = map_tensors(dict(bound.arguments), lambda tensor: fixed[id(tensor)])
        static = inspect.BoundArguments(bound.signature, arguments)
        return fn(*static.args, **static.kwargs)

    with backend.warm_stream(), autocast_cache_off():
        inputs.fill(tensors)
        versions = inputs.versions()
        for _ in range(WARM_UPS):
            backend.set_rng_state(rng)
            reference = run(inputs.buffers)
        _require_unwritten(signature, inputs, versions, tensors)
        _require_cloneable(reference, backend.device)
        backend.trim()  # memory cached for warm-up is of no use to the capture
        with collector_paused():
            graph = backend.capture(lambda: run(inputs.buffers), pool)
        try:
            _prove(reference, graph, backend=backend, rng=rng)
            # Eager gets tensors of its own: a memo keyed by object or address must not mislead both.
            for each in (inputs, others):
                each.fill(canary.second_inputs(tensors))
            backend.set_rng_state(rng)
            _prove(run(others.buffers), graph, backend=backend, rng=rng)
        except BaseException:
            backend.synchronize()
            graph.release()
            raise
    return Entry(inputs, graph)


def _prove(eager: Any, graph: CapturedGraph, *, backend: GraphBackend, rng: Tensor) -> None:
    backend.set_rng_state(rng)
    graph.replay()
    difference = canary.difference(eager, graph.outputs, device=backend.device)
    if difference:
        raise RunEagerError(Reason.CANARY_MISMATCH, difference)


def _require_unwritten(
    signature: Signature, inputs: StaticInputs, versions: list[int], tensors: list[Tensor]
) -> None:
    """A region that writes into its arguments would write into the fixed copies only."""
    names = tensor_names(signature.arguments)
    rows = zip(names, versions, inputs.versions(), tensors, inputs.buffers, strict=True)
    for name, before, after, given, buffer in rows:
        if before != after or first_mismatch(given.contiguous(), buffer.contiguous()) is not None:
            detail = f"{argument_name(name)}: written in place by the region; copy it first"
            raise RunEagerError(Reason.UNSUPPORTED_INPUT, detail)


def _require_cloneable(outputs: Any, device: torch.device) -> None:
    try:
        flatten(outputs, device=device)
    except UnsupportedValueError as error:
        raise RunEagerError(Reason.UNSUPPORTED_OUTPUT, f"output{error}") from None
