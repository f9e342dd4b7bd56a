"""From a call to a proven graph: warm up on fixed copies of the inputs, capture, compare with eager.

Source: graph spec sections 3.4, 3.5 and 8.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.fusion.compare import first_mismatch
from accel.graphs import canary
from accel.graphs.arguments import NamedArguments
from accel.graphs.backend import CapturedGraph, GraphBackend, RandomState
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
    rng: RandomState,
    persistent: frozenset[str],
    is_weight: Callable[[Tensor], bool],
    outputs: Outputs,
) -> Entry:
    """Capture one call. The caller's tensors are only read.

    rng: state that every run starts from; the caller restores it. persistent, outputs: see
    `WholeGraph`.
    Raises: RunEagerError if the region can't be served exactly; CaptureFailedError; what the region raises.
    """
    tensors = call.tensors
    inputs = StaticInputs(tensors, persistent=_persistent_tensors(call.arguments, persistent))
    others = StaticInputs(tensors)
    bench = _Bench(backend, rng)
    with backend.warm_stream(), autocast_cache_off():
        inputs.fill(tensors)
        versions = inputs.versions()
        for _ in range(WARM_UPS + torch.backends.cudnn.benchmark):
            eager = bench.run(lambda: call.on(inputs.buffers))
        _require_unwritten(call, inputs, versions)
        _require_cloneable(eager.value, backend.device)
        backend.trim()  # memory cached for warm-up is of no use to the capture
        rng.restore(backend)  # code that runs while recording draws what a replay would draw
        with collector_paused():
            graph = record(lambda: call.on(inputs.buffers), pool)
        try:
            inputs.fill(tensors)  # a recording that keeps its state in place may have written to them
            replay = bench.prove(graph, eager)
            # Eager gets tensors of its own: a memo keyed by object or address must not mislead both.
            for each in (inputs, others):
                each.fill(canary.second_inputs(tensors))
            second = bench.run(lambda: call.on(others.buffers))
            with _guards_may_refuse():
                replay = bench.prove(graph, second)
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
        eager_ms=eager.ms,
        replay_ms=replay.ms,
    )
    return Entry(inputs, graph, results, not eager.end.equals(rng), stats)


class _Run(NamedTuple):
    """One run. ms: wall time from an idle device to an idle device. end: the random state it left."""

    value: Any
    ms: float
    end: RandomState


class _Bench:
    """Runs things one after the other, all from one random state."""

    def __init__(self, backend: GraphBackend, start: RandomState) -> None:
        self._backend = backend
        self._start = start

    def run(self, work: Callable[[], Any]) -> _Run:
        self._start.restore(self._backend)
        self._backend.synchronize()
        started = time.perf_counter()
        value = work()
        self._backend.synchronize()
        return _Run(value, 1e3 * (time.perf_counter() - started), RandomState.of(self._backend))

    def prove(self, graph: CapturedGraph, eager: _Run) -> _Run:
        """A replay that gives the bits of `eager` and draws the same random numbers.

        Raises: RunEagerError if it does not.
        """
        replay = self.run(graph.replay)
        difference = canary.difference(eager.value, graph.outputs, device=self._backend.device)
        if not difference and not self._drew_alike(eager.end, replay.end):
            difference = "random numbers: a replay does not draw those of eager; pass them as an argument"
        if difference:
            raise RunEagerError(Reason.CANARY_MISMATCH, difference)
        return replay

    def _drew_alike(self, eager: RandomState, replay: RandomState) -> bool:
        """What eager does not draw from the host, other threads may."""
        host_unused = torch.equal(eager.host, self._start.host)
        return torch.equal(eager.device, replay.device) and (
            host_unused or torch.equal(eager.host, replay.host)
        )


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
