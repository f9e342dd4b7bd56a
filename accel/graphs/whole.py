"""A region as one graph per signature: copy the inputs in, replay, hand out copies of the results.

The first call of a signature captures (see `accel.graphs.capture`). Whatever goes wrong on the way,
the call runs eager on the caller's own inputs and says why. Source: graph spec sections 3, 7 and 8.
"""

from __future__ import annotations

import gc
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accel.fusion.gate import fusion_epoch
from accel.graphs.backend import CaptureFailedError, GraphBackend
from accel.graphs.buffers import clone_layout
from accel.graphs.cache import BlockList, GraphCache
from accel.graphs.capture import Entry, RunEagerError, capture
from accel.graphs.containment import describe
from accel.graphs.misses import MissLog
from accel.graphs.modules import ModuleWatch
from accel.graphs.signature import Environment, Signature
from accel.graphs.tree import UnsupportedValueError, argument_name, flatten, map_tensors
from accel.policy import StagePolicy
from accel.record import Kind, Outcome, Reason

_log = logging.getLogger("samebit")


class WholeGraph:
    """The graphs of one region.

    name: "stage.region", for messages. fused: sites allowed to fuse inside.
    extra_bytes: device memory held by graphs and fixed inputs. capture_ms: time spent on captures.
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
    ) -> None:
        self.extra_bytes = 0
        self.capture_ms = 0.0
        self._fn = fn
        self._name = name
        self._parameters = inspect.signature(fn)
        self._backend = backend
        self._watch = watch
        self._fused = fused
        self._cache = GraphCache[Entry](max_entries=policy.max_entries, on_full=policy.on_full)
        self._blocked = BlockList()
        self._misses = MissLog(name)
        self._state = self._current_state()

    def __len__(self) -> int:
        """Live graphs."""
        return len(self._cache)

    @property
    def evictions(self) -> int:
        return self._cache.evictions

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Outcome]:
        """The region's value, bit for bit that of eager, and how it came about.

        Raises: what the region itself raises.
        """
        try:
            with self._backend.exclusive() as outermost:
                if not outermost or self._backend.is_capturing():
                    raise RunEagerError(Reason.NESTED_CAPTURE, "called inside another region")
                return self._serve(args, kwargs)
        except RunEagerError as refusal:
            outcome = refusal.outcome
        return self._fn(*args, **kwargs), outcome

    def close(self) -> None:
        """Free all graphs. The region can still be called and captures anew."""
        with self._backend.exclusive():
            if len(self._cache):
                with self._accounted():
                    self._destroy(self._cache.clear())

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Outcome]:
        self._require_legal()
        bound = self._parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        signature, tensors = self._sign(bound)
        entry = self._cache.get(signature)
        if entry is not None:
            return self._replay(entry, tensors), Outcome(Kind.REPLAYED)
        self._require_room(signature)
        entry = self._admit(signature, bound, tensors)
        return self._replay(entry, tensors), Outcome(Kind.CAPTURED)

    def _require_legal(self) -> None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise RunEagerError(Reason.MULTI_GPU, f"world size {distributed.get_world_size()}")
        refusal = self._watch.refusal()
        self._drop_outdated()
        if refusal is not None and refusal.reason is not None:
            raise RunEagerError(refusal.reason, refusal.detail)

    def _drop_outdated(self) -> None:
        """After a change of weights or gates, graphs read old memory or hold kernels now switched off."""
        if self._state != self._current_state():
            self.close()
            self._blocked = BlockList()
            self._state = self._current_state()

    def _current_state(self) -> tuple[int, int]:
        return self._watch.epoch, fusion_epoch()

    def _sign(self, bound: inspect.BoundArguments) -> tuple[Signature, list[Tensor]]:
        device = self._backend.device
        try:
            arguments, tensors = flatten(dict(bound.arguments), device=device)
        except UnsupportedValueError as error:
            raise RunEagerError(Reason.UNSUPPORTED_INPUT, argument_name(str(error))) from None
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RunEagerError(Reason.GRAD_ENABLED, "an argument requires grad")
        return Signature(arguments, Environment.current(device.type), self._fused), tensors

    def _require_room(self, signature: Signature) -> None:
        why = self._blocked.reason(signature)
        if why:
            raise RunEagerError(Reason.BLOCKED_SIGNATURE, why)
        room = self._cache.has_room()
        difference = self._misses.note(signature, self._cache, full=not room)
        if not room:
            raise RunEagerError(Reason.CACHE_FULL, difference)

    def _replay(self, entry: Entry, tensors: list[Tensor]) -> Any:
        self._backend.join_previous()
        entry.inputs.fill(tensors)
        try:
            entry.graph.replay()
        except RuntimeError as error:
            self._blocked.disable(f"a replay failed: {describe(error)}")
            self.close()
            raise RunEagerError(Reason.REPLAY_FAILED, describe(error)) from None
        return self._hand_out(entry.graph.outputs)

    def _hand_out(self, outputs: Any) -> Any:
        """Copies that no later replay touches; a weight is handed out itself, as in eager."""
        copies: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            if self._watch.is_weight(tensor):
                return tensor
            if id(tensor) not in copies:
                copies[id(tensor)] = clone_layout(tensor)
            return copies[id(tensor)]

        return map_tensors(outputs, own)

    def _admit(self, signature: Signature, bound: inspect.BoundArguments, tensors: list[Tensor]) -> Entry:
        """Capture, prove and keep a graph; or block the signature and raise RunEagerError."""
        failure: RunEagerError | None = None
        rng = self._backend.rng_state()
        with self._accounted():
            self._destroy(self._cache.make_room())
            if not len(self._cache):
                self._pool = self._backend.new_pool()  # a pool dies with its last graph
            try:
                entry = capture(
                    self._fn, signature, bound, tensors, backend=self._backend, pool=self._pool, rng=rng
                )
            except Exception as error:
                failure = self._contain(signature, error)
            finally:
                self._backend.set_rng_state(rng)
            if failure is not None:
                gc.collect()  # frames of the handled exception keep tensors in reference cycles
        if failure is not None:
            raise failure
        self._drop_outdated()  # warm-up may have moved a gate; the new graph was made after that
        self._cache.add(signature, entry)
        return entry

    def _contain(self, signature: Signature, error: Exception) -> RunEagerError:
        """Block the signature; the returned error holds words alone, no tensors."""
        outcome, cause = _classify(error)
        spoiled = isinstance(error, CaptureFailedError) and error.spoiled
        if not (spoiled and self._blocked.forgive_once(signature)):
            self._blocked.block(signature, str(outcome) + f": {outcome.detail}", cause=cause)
        assert outcome.reason is not None
        _log.warning("%s: no graph, runs %s: %s", self._name, outcome, outcome.detail)
        return RunEagerError(outcome.reason, outcome.detail)

    def _destroy(self, entries: list[Entry]) -> None:
        """The device is idle: `_accounted` has waited."""
        for entry in entries:
            entry.graph.release()

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Add the block's time and its lasting change of device memory to the totals."""
        started = time.perf_counter()
        self._backend.trim()
        reserved = self._backend.reserved_bytes()
        try:
            yield
        finally:
            self._backend.trim()
            self.extra_bytes = max(0, self.extra_bytes + self._backend.reserved_bytes() - reserved)
            self.capture_ms += 1e3 * (time.perf_counter() - started)


def _classify(error: Exception) -> tuple[Outcome, str]:
    """What to report, and what counts as the same cause."""
    if isinstance(error, RunEagerError):
        return error.outcome, str(error.outcome.reason)
    if isinstance(error, torch.OutOfMemoryError):
        return Outcome(Kind.EAGER, Reason.OOM, describe(error)), "out of memory"
    if isinstance(error, CaptureFailedError):
        return Outcome(Kind.EAGER, Reason.CAPTURE_FAILED, describe(error.cause)), type(error.cause).__name__
    # Warm-up runs the region as eager does, so eager is about to raise the same to the caller.
    return Outcome(Kind.EAGER, Reason.CAPTURE_FAILED, f"in warm-up: {describe(error)}"), ""
