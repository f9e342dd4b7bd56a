"""Makes and destroys the graphs of one region, and keeps account of memory, time and failures.

Source: graph spec sections 5 and 7.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accel.graphs.backend import CaptureFailedError, GraphBackend, RandomState
from accel.graphs.cache import BlockList, MemoryBudget
from accel.graphs.capture import Call, Entry, Record, RunEagerError, capture
from accel.graphs.containment import describe
from accel.graphs.results import Outputs
from accel.graphs.signature import Signature
from accel.record import Kind, Outcome, Reason

_log = logging.getLogger("samebit")


class GraphMaker:
    """Where a region's graphs come from and go to. Arguments as in `WholeGraph`.

    blocked: signatures not to be tried again. captures, failures: attempts by how they ended.
    extra_bytes: device memory held by graphs and fixed inputs. capture_ms: time spent on captures.
    """

    def __init__(
        self,
        *,
        name: str,
        backend: GraphBackend,
        record: Record,
        outputs: Outputs,
        persistent: frozenset[str],
        is_weight: Callable[[Tensor], bool],
        budget: MemoryBudget,
    ) -> None:
        self.blocked = BlockList()
        self.captures = 0
        self.failures = 0
        self.extra_bytes = 0
        self.capture_ms = 0.0
        self._name = name
        self._backend = backend
        self._record = record
        self._outputs = outputs
        self._persistent = persistent
        self._is_weight = is_weight
        self._budget = budget
        self._pool: Any = None

    def make(self, signature: Signature, call: Call, *, new_pool: bool) -> Entry:
        """Capture and prove a graph. new_pool: no other graph lives; a pool dies with its last graph.

        Graphs share a pool, so that one reuses the scratch memory of another. Under a memory budget
        each has its own: only then a graph that is dropped gives its memory back.

        Raises: RunEagerError; the signature is then blocked and nothing of the attempt is left.
        """
        failure: RunEagerError | None = None
        bytes_before, ms_before = self.extra_bytes, self.capture_ms
        rng = RandomState.of(self._backend)
        with self._accounted():
            if new_pool or self._budget.limited:
                self._pool = self._backend.new_pool()
            try:
                entry = capture(
                    call,
                    backend=self._backend,
                    record=self._record,
                    pool=self._pool,
                    rng=rng,
                    persistent=self._persistent,
                    is_weight=self._is_weight,
                    outputs=self._outputs,
                )
            except Exception as error:
                failure = self._contain(signature, error)
            finally:
                rng.restore(self._backend)
            if failure is not None:
                gc.collect()  # frames of the handled exception keep tensors in reference cycles
        if failure is not None:
            raise failure
        entry.stats.nbytes = self.extra_bytes - bytes_before
        entry.stats.capture_ms = self.capture_ms - ms_before
        excess = self._budget.excess()
        if excess:
            retired = [entry]
            del entry  # the last reference must go before the memory is counted
            self.destroy(retired)
            raise self._contain(signature, RunEagerError(Reason.OVER_BUDGET, excess))
        self.captures += 1
        return entry

    def destroy(self, retired: list[Entry]) -> None:
        """Destroy graphs that serve no more, together and at an idle point.

        The device is waited for first, and the caller keeps other threads from replaying siblings.
        """
        if retired:
            with self._accounted():
                while retired:
                    retired.pop().graph.release()

    def _contain(self, signature: Signature, error: Exception) -> RunEagerError:
        """Block the signature; the returned error holds words alone, no tensors."""
        self.failures += 1
        outcome, cause = _classify(error)
        spoiled = isinstance(error, CaptureFailedError) and error.spoiled
        if not (spoiled and self.blocked.forgive_once(signature)):
            self.blocked.block(signature, str(outcome) + f": {outcome.detail}", cause=cause)
        assert outcome.reason is not None
        _log.warning("%s: no graph, runs %s: %s", self._name, outcome, outcome.detail)
        return RunEagerError(outcome.reason, outcome.detail)

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
            before = self.extra_bytes
            self.extra_bytes = max(0, before + self._backend.reserved_bytes() - reserved)
            self._budget.held += self.extra_bytes - before
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
