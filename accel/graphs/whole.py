"""A region as one graph per signature: copy the inputs in, replay, hand out the results.

The first call of a signature captures (see `accel.graphs.capture`). Whatever goes wrong on the way,
the call runs eager on the caller's own inputs and says why. Source: graph spec sections 3, 5, 7 and 8.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor

from accel.fusion.gate import fusion_epoch
from accel.graphs.argument_keys import ArgumentKeys
from accel.graphs.arguments import NamedArguments
from accel.graphs.backend import GraphBackend, RandomState
from accel.graphs.breaks import Break
from accel.graphs.buffers import Tokens
from accel.graphs.cache import BlockList, GraphCache, MemoryBudget
from accel.graphs.capture import Call, Entry, Record, RunEagerError
from accel.graphs.containment import describe
from accel.graphs.maker import GraphMaker
from accel.graphs.misses import MissLog
from accel.graphs.modules import ModuleWatch
from accel.graphs.results import Outputs
from accel.graphs.signature import Environment, Signature
from accel.graphs.stats import GraphStats
from accel.graphs.tree import Key
from accel.policy import StagePolicy
from accel.record import Kind, Outcome, Reason

_log = logging.getLogger("samebit")


class WholeGraph:
    """The graphs of one region.

    name: "stage.region", for messages. fused: sites allowed to fuse inside. record: how a function is
    recorded into a pool; by default as one graph. outputs: `clone` gives results to keep; `view` the
    graph's own tensors, to be consumed before the next call of this region. persistent: arguments that
    change rarely, copied only when they did (see `StaticInputs`). budget: shared by the regions of a
    stage; by default one of the region's own.
    allow_capture: whether a new signature is captured; otherwise it runs eager as `not_warmed`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str,
        backend: GraphBackend,
        watch: ModuleWatch,
        policy: StagePolicy,
        fused: frozenset[str],
        record: Record | None = None,
        outputs: Outputs = "clone",
        persistent: Collection[str] = (),
        budget: MemoryBudget | None = None,
    ) -> None:
        self.allow_capture = True
        self._fn = fn
        self._name = name
        self._function = NamedArguments(fn)
        self._backend = backend
        self._watch = watch
        self._fused = fused
        self._keys = ArgumentKeys(self._function, backend.device)
        self._cache = GraphCache[Entry](max_entries=policy.max_entries, on_full=policy.on_full)
        self._misses = MissLog(name)
        self._maker = GraphMaker(
            name=name,
            backend=backend,
            record=record or backend.capture,
            outputs=outputs,
            persistent=frozenset(persistent),
            is_weight=watch.is_weight,
            budget=budget or MemoryBudget(policy.memory_budget_mb),
        )
        # Not where a replay overwrites what callers hold: they may hand it in again.
        self._launch_first = outputs == "clone"
        self._state = self._current_state()
        self._environment = Environment.current(backend.device.type)
        self._steady = False  # whether the last call found all as the one before

    def __len__(self) -> int:
        """Live graphs."""
        return len(self._cache)

    @property
    def evictions(self) -> int:
        return self._cache.evictions

    @property
    def extra_bytes(self) -> int:
        """Device memory held by graphs and fixed inputs."""
        return self._maker.extra_bytes

    @property
    def capture_ms(self) -> float:
        """Time spent on captures."""
        return self._maker.capture_ms

    @property
    def breaks(self) -> list[Break]:
        """Of all live graphs, in order."""
        return [each for entry in self._cache.entries() for each in entry.graph.breaks]

    def stats(self) -> GraphStats:
        """What happened so far, as a copy."""
        return GraphStats(
            hits=self._cache.hits,
            misses=self._cache.misses,
            captures=self._maker.captures,
            failures=self._maker.failures,
            evictions=self._cache.evictions,
            blocked=self._maker.blocked.reasons(),
            extra_bytes=self.extra_bytes,
            capture_ms=self.capture_ms,
            entries=tuple(dataclasses.replace(entry.stats) for entry in self._cache.entries()),
        )

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        sealed: Hashable | None = None,
        tokens: Tokens | None = None,
    ) -> tuple[Any, Outcome]:
        """The region's value, bit for bit that of eager, and how it came about.

        sealed: stands for the arguments in the signature. The caller vouches that calls with equal keys
        agree in everything but the content of their tensors: structure, constants, shapes, dtypes,
        layouts, and which tensors are one. Calls with a sealed key share no graph with others.
        tokens: name of a persistent argument -> what changes whenever its content does.
        Raises: what the region itself raises.
        """
        try:
            with self._backend.exclusive() as outermost:
                if not outermost or self._backend.is_capturing():
                    raise RunEagerError(Reason.NESTED_CAPTURE, "called inside another region")
                return self._serve(args, kwargs, sealed, tokens)
        except RunEagerError as refusal:
            outcome = refusal.outcome
        return self._run_eager(args, kwargs, outcome)

    def close(self) -> None:
        """Free all graphs. The region can still be called and captures anew."""
        with self._backend.exclusive():
            self._maker.destroy(self._cache.clear())

    def reset(self) -> None:
        """Free all graphs and let signatures that failed before be captured again."""
        self.close()
        self._maker.blocked = BlockList()

    def _run_eager(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Outcome
    ) -> tuple[Any, Outcome]:
        """If memory runs out, give up all graphs of the region for a second attempt."""
        if outcome.reason is Reason.NESTED_CAPTURE or not len(self):
            return self._fn(*args, **kwargs), outcome
        rng = RandomState.of(self._backend)
        try:
            return self._fn(*args, **kwargs), outcome
        except torch.OutOfMemoryError as error:
            outcome = Outcome(Kind.EAGER, Reason.OOM, describe(error))
        _log.warning("%s: out of memory; its graphs are dropped, the call is tried again.", self._name)
        self.close()
        rng.restore(self._backend)
        return self._fn(*args, **kwargs), outcome

    def _serve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sealed: Hashable | None, tokens: Tokens | None
    ) -> tuple[Any, Outcome]:
        arguments, tensors = self._keys.of_call(args, kwargs, sealed)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RunEagerError(Reason.GRAD_ENABLED, "an argument requires grad")
        if (served := self._replay_then_check(arguments, tensors, tokens)) is not None:
            return served
        signature = Signature(arguments, self._legal_environment(), self._fused)
        entry = self._cache.get(signature)
        if entry is not None:
            return self._replay(entry, tensors, tokens), Outcome(Kind.REPLAYED)
        self._require_room(signature)
        values = self._function.bind(args, kwargs)
        call = Call(self._function, values, *self._keys.of_values(values))
        entry = self._admit(signature, call)
        return self._replay(entry, call.tensors, tokens), Outcome(Kind.CAPTURED)

    def _replay_then_check(
        self, arguments: Key, tensors: list[Tensor], tokens: Tokens | None
    ) -> tuple[Any, Outcome] | None:
        """Let the device work while the host looks at the rest; `None` where that gave no valid result.

        Switches and modules are taken to be as at the last call. The graph reads memory that it keeps alive
        and writes its own, and the caller's tensors are untouched: the call can still be served otherwise.
        Replays that call functions of the region never go first.
        """
        if not (self._launch_first and self._steady):
            return None
        signature = Signature(arguments, self._environment, self._fused)
        entry = self._cache.peek(signature)
        if entry is None or entry.graph.runs_python:
            return None
        rng = RandomState.of(self._backend) if entry.draws else None
        value = self._replay(entry, tensors, tokens)
        same_environment = self._environment == Environment.current(self._backend.device.type)
        if same_environment and self._refusal() is None and self._state == self._current_state():
            self._cache.get(signature)  # which counts
            return value, Outcome(Kind.REPLAYED)
        if rng is not None:
            rng.restore(self._backend)
        entry.stats.replays -= 1  # it served nobody
        return None

    def _legal_environment(self) -> Environment:
        """The switches as they are now, if a graph may serve calls."""
        before, self._environment = self._environment, Environment.current(self._backend.device.type)
        self._steady = False
        refusal = self._refusal()
        self._drop_outdated()
        if refusal is not None and refusal.reason is not None:
            raise RunEagerError(refusal.reason, refusal.detail)
        self._steady = self._environment == before
        return self._environment

    def _refusal(self) -> Outcome | None:
        """Why no graph may serve a call now."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            return Outcome(Kind.EAGER, Reason.MULTI_GPU, f"world size {distributed.get_world_size()}")
        return self._watch.refusal()

    def _drop_outdated(self) -> None:
        """After a change of weights or gates, graphs read old memory or hold kernels now switched off."""
        if self._state != self._current_state():
            self.reset()
            self._state = self._current_state()

    def _current_state(self) -> tuple[int, int]:
        return self._watch.epoch, fusion_epoch()

    def _require_room(self, signature: Signature) -> None:
        why = self._maker.blocked.reason(signature)
        if why:
            raise RunEagerError(Reason.BLOCKED_SIGNATURE, why)
        room = self._cache.has_room()
        difference = self._misses.note(signature, self._cache, full=self.allow_capture and not room)
        if not self.allow_capture:
            raise RunEagerError(Reason.NOT_WARMED, difference)
        if not room:
            raise RunEagerError(Reason.CACHE_FULL, difference)

    def _replay(self, entry: Entry, tensors: list[Tensor], tokens: Tokens | None) -> Any:
        self._backend.join_previous()
        rng = RandomState.of(self._backend) if entry.draws else None
        try:
            entry.inputs.fill(tensors, tokens)
            entry.graph.replay()
            room = entry.results.allocate()
        except (RuntimeError, RunEagerError) as error:
            if rng is not None:
                rng.restore(self._backend)
            raise self._replay_failure(error) from None
        entry.stats.replays += 1
        entry.stats.last_used = time.time()
        return entry.results.hand_out(room)

    def _replay_failure(self, error: Exception) -> RunEagerError:
        """A guard of this one call, a lack of memory, or a graph that can't be trusted any more."""
        if isinstance(error, RunEagerError):
            return error
        if isinstance(error, torch.OutOfMemoryError):
            return RunEagerError(Reason.OOM, describe(error))
        self._maker.blocked.disable(f"a replay failed: {describe(error)}")
        self.close()
        return RunEagerError(Reason.REPLAY_FAILED, describe(error))

    def _admit(self, signature: Signature, call: Call) -> Entry:
        """Capture and keep a graph, in the place of another if need be."""
        self._maker.destroy(self._cache.make_room())
        entry = self._maker.make(signature, call, new_pool=not len(self._cache))
        entry = dataclasses.replace(entry, weights=self._watch.memory())
        self._drop_outdated()  # warm-up may have moved a gate; the new graph was made after that
        self._cache.add(signature, entry)
        return entry
