"""From a call to a proven graph: warm up on fixed copies of the inputs, capture, compare with eager.

Source: graph spec sections 3.4, 3.5 and 8.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.fusion.compare import first_mismatch
from accel.graphs import canary
from accel.graphs.arguments import NamedArguments
from accel.graphs.backend import CapturedGraph, GraphBackend
from accel.graphs.buffers import StaticInputs
from accel.graphs.containment import autocast_cache_off, collector_paused
from accel.graphs.results import Outputs, Results
from accel.graphs.stats import EntryStats
from accel.graphs.tree import (
    Key,
    Node,
    TensorKey,
    UnsupportedValueError,
    argument_name,
    flatten,
    leaf_names,
    map_tensors,
    tensor_names,
)
from accel.record import Kind, Outcome, Reason

# How a function is recorded: what it runs, and the memory pool.
Record = Callable[[Callable[[], Any], Any], CapturedGraph]

# They create library handles and workspaces, load kernels, and let fusion gates verify what is new.
# The search of cuDNN's benchmark mode takes one more.
WARM_UPS = 2


class RunEagerError(Exception):
    """Ends the attempt to serve a call from a graph."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.outcome = Outcome(Kind.EAGER, reason, detail)


@dataclass(frozen=True)
class Call:
    """One call of a region. values: by name. tensors: the distinct ones, in the order of `arguments`."""

    function: NamedArguments
    values: dict[str, Any]
    arguments: Key
    tensors: list[Tensor]

    def on(self, buffers: list[Tensor]) -> Any:
        """The function's value with buffers in the place of the tensors."""
        fixed = {id(tensor): buffer for tensor, buffer in zip(self.tensors, buffers, strict=True)}
        # Fresh containers every time, in case the region changes them.
        return self.function.call(map_tensors(self.values, lambda tensor: fixed[id(tensor)]))


@dataclass(frozen=True)
class Entry:
    """A graph, the buffers it reads and the value it writes.

    draws: whether it uses random numbers. weights: memory kept for the graph to read, so that a launch is
    harmless even when the weights have moved since.
    """

    inputs: StaticInputs
    graph: CapturedGraph
    results: Results
    draws: bool
    stats: EntryStats
    weights: Sequence[torch.UntypedStorage] = ()


def capture(
    call: Call,
    *,
    backend: GraphBackend,
    record: Record,
    pool: Any,
    rng: Tensor,
    persistent: frozenset[str],
    is_weight: Callable[[Tensor], bool],
    outputs: Outputs,
) -> Entry:
    """Capture one call. The caller's tensors are only read.

    rng: generator state that every run starts from; the caller restores it. persistent, outputs: see
    `WholeGraph`.
    Raises: RunEagerError if the region can't be served exactly; CaptureFailedError; what the region raises.
    """
    tensors = call.tensors
    inputs = StaticInputs(tensors, persistent=_persistent_tensors(call.arguments, persistent))
    others = StaticInputs(tensors)
    clock = _Clock(backend)
    with backend.warm_stream(), autocast_cache_off():
        inputs.fill(tensors)
        versions = inputs.versions()
        for _ in range(WARM_UPS + torch.backends.cudnn.benchmark):
            backend.set_rng_state(rng)
            reference = clock.time(lambda: call.on(inputs.buffers))
        eager_ms = clock.ms
        draws = not torch.equal(rng, backend.rng_state())
        _require_unwritten(call, inputs, versions)
        _require_cloneable(reference, backend.device)
        backend.trim()  # memory cached for warm-up is of no use to the capture
        backend.set_rng_state(rng)  # code that runs while recording draws what a replay would draw
        with collector_paused():
            graph = record(lambda: call.on(inputs.buffers), pool)
        try:
            inputs.fill(tensors)  # a recording that keeps its state in place may have written to them
            _prove(reference, graph, clock=clock, backend=backend, rng=rng)
            # Eager gets tensors of its own: a memo keyed by object or address must not mislead both.
            for each in (inputs, others):
                each.fill(canary.second_inputs(tensors))
            backend.set_rng_state(rng)
            with _guards_may_refuse():
                _prove(call.on(others.buffers), graph, clock=clock, backend=backend, rng=rng)
        except BaseException:
            backend.synchronize()
            graph.release()
            raise
    results = Results(graph.outputs, is_weight=is_weight, outputs=outputs)
    if outputs == "view":
        inputs.expose(results.tensors)
    stats = EntryStats(
        arguments=call.arguments,
        copied_in=inputs.nbytes,
        copied_out=results.copied_bytes,
        eager_ms=eager_ms,
        replay_ms=clock.ms,
    )
    return Entry(inputs, graph, results, draws, stats)


class _Clock:
    """ms: wall time of the last thing timed, from an idle device to an idle device."""

    def __init__(self, backend: GraphBackend) -> None:
        self.ms = 0.0
        self._backend = backend

    def time(self, work: Callable[[], Any]) -> Any:
        self._backend.synchronize()
        started = time.perf_counter()
        value = work()
        self._backend.synchronize()
        self.ms = 1e3 * (time.perf_counter() - started)
        return value


def _prove(eager: Any, graph: CapturedGraph, *, clock: _Clock, backend: GraphBackend, rng: Tensor) -> None:
    backend.set_rng_state(rng)
    clock.time(graph.replay)
    difference = canary.difference(eager, graph.outputs, device=backend.device)
    if difference:
        raise RunEagerError(Reason.CANARY_MISMATCH, difference)


@contextmanager
def _guards_may_refuse() -> Iterator[None]:
    """A guarded graph need not serve altered inputs: calls with such values run eager anyway."""
    try:
        yield
    except RunEagerError as refusal:
        if refusal.outcome.reason is not Reason.GUARD_FAILED:
            raise


def _persistent_tensors(arguments: Key, persistent: frozenset[str]) -> dict[int, tuple[str, ...]]:
    """Index of a tensor -> the arguments that hold it, where all of these are persistent."""
    holders: defaultdict[int, set[str]] = defaultdict(set)
    assert isinstance(arguments, Node)
    for argument, key in arguments.items:
        for _, leaf in leaf_names(key):
            if isinstance(leaf, TensorKey):
                holders[leaf.alias].add(argument)
    return {alias: tuple(sorted(names)) for alias, names in holders.items() if names <= persistent}


def _require_unwritten(call: Call, inputs: StaticInputs, versions: list[int]) -> None:
    """A region that writes into its arguments would write into the fixed copies only."""
    names = tensor_names(call.arguments)
    rows = zip(names, versions, inputs.versions(), call.tensors, inputs.buffers, strict=True)
    for name, before, after, given, buffer in rows:
        if before != after or first_mismatch(given.contiguous(), buffer.contiguous()) is not None:
            detail = f"{argument_name(name)}: written in place by the region; copy it first"
            raise RunEagerError(Reason.UNSUPPORTED_INPUT, detail)


def _require_cloneable(outputs: Any, device: torch.device) -> None:
    try:
        flatten(outputs, device=device)
    except UnsupportedValueError as error:
        raise RunEagerError(Reason.UNSUPPORTED_OUTPUT, f"output{error}") from None
