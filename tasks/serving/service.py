"""From bytes of any protocol to actions: read, check, queue, infer, and account for what happened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from accel.errors import SamebitError
from tasks.serving import garbage
from tasks.serving.calls import Call
from tasks.serving.errors import FaultError, InvalidRequestError, ServingError, UnavailableError
from tasks.serving.metrics import Metrics
from tasks.serving.policy import Answer, Policy
from tasks.serving.scheduler import Scheduler

_log = logging.getLogger("samebit")

T = TypeVar("T")

REST_AT_LEAST_EVERY = 64
"""Exchanges after which garbage is collected although others are under way."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answered call.

    timings: milliseconds by stage, `preprocess_ms`, `queue_ms`, those of the policy, and `infer_ms`, the
    whole time in the worker.
    """

    call: Call
    answer: Answer
    timings: Mapping[str, float]


class Service:
    """Answers calls with one policy. Made and used in one event loop.

    deadline_ms: of calls that name none. slow_ms: calls that took longer are logged.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        queue_size: int,
        latest_wins: bool = False,
        deadline_ms: float | None = None,
        slow_ms: float | None = None,
    ) -> None:
        self.metrics = Metrics()
        self.warm = asyncio.Event()
        self._policy = policy
        self._deadline_ms = deadline_ms
        self._slow_ms = slow_ms
        self._scheduler = Scheduler(capacity=queue_size, latest_wins=latest_wins)
        # Messages are decoded and checked here, not in the event loop; one thread keeps them in order.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._stopping = False
        self._exchanges = 0
        self._since_rest = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.metrics.watch(queue_depth=lambda: self._scheduler.waiting, regions=policy.region_calls)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._policy.metadata

    @property
    def ready(self) -> bool:
        return self.warm.is_set() and not self._stopping

    async def warm_up(self) -> None:
        """Before anything is answered. Raises: what the policy's `warm_up` raises."""
        await self._scheduler.run(self._policy.warm_up, client=None)
        garbage.settle()
        self.warm.set()

    async def answer(self, read: Callable[[], Call], *, client: Hashable, protocol: str) -> Reply:
        """Actions for one message.

        read: decodes it; called in another thread. client: whose turn it is; one for each connection.
        Raises: ServingError; nothing else.
        """
        outcome = "gone"
        try:
            reply = await self._answer(read, client)
            outcome = "ok"
            return reply
        except ServingError as error:
            outcome = error.reason
            raise
        except Exception:
            outcome = FaultError.reason
            _log.exception("A request ended in a fault")
            raise FaultError("the server is at fault; its log says more") from None
        finally:
            self.metrics.outcome(protocol, outcome)

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Around everything from a message's arrival until its reply is sent; a stop waits for it."""
        self._exchanges += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._exchanges -= 1
            if not self._exchanges:
                self._quiet.set()
            self._rest_if_due()

    async def drain(self) -> None:
        """Refuse new calls from now on, and wait until those that were taken are answered."""
        self._stopping = True
        await self._quiet.wait()

    def close(self) -> None:
        self._stopping = True
        self._scheduler.close()
        self._reader.shutdown(wait=False, cancel_futures=True)
        garbage.restore()

    def _rest_if_due(self) -> None:
        """After a reply was sent, not before: whoever waits for one does not wait for this."""
        self._since_rest += 1
        if self.warm.is_set() and (not self._exchanges or self._since_rest >= REST_AT_LEAST_EVERY):
            self._since_rest = 0
            self._scheduler.run_between_jobs(garbage.rest)

    async def _answer(self, read: Callable[[], Call], client: Hashable) -> Reply:
        if not self.ready:
            doing = "stopping" if self._stopping else "warming up"
            raise UnavailableError(f"the server is {doing}; try again, or another one")
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        call, request = await loop.run_in_executor(self._reader, self._read, read)
        prepared = loop.time()
        deadline_ms = call.runtime.deadline_ms or self._deadline_ms
        done = await self._scheduler.run(
            lambda: _timed(lambda: self._policy.infer(request)),
            client=client,
            deadline=None if deadline_ms is None else arrived + deadline_ms / 1e3,
        )
        answer, infer_ms = done.value
        if not np.isfinite(answer.actions).all():
            _log.error("Request %r: the policy gave actions that are not finite", call.request_id)
            raise FaultError("the policy gave actions that are not finite; none were sent")
        timings = {
            "preprocess_ms": (prepared - arrived) * 1e3,
            "queue_ms": done.queued_ms,
            "infer_ms": infer_ms,
            **answer.stage_ms,
        }
        self.metrics.stage_times(timings)
        self._log_slow(call, (loop.time() - arrived) * 1e3, timings)
        return Reply(call=call, answer=answer, timings=timings)

    def _read(self, read: Callable[[], Call]) -> tuple[Call, Any]:
        """The call, and the request made of it. What is wrong with them is for the client to know."""
        try:
            call = read()
            return call, self._policy.prepare(call.observation, call.parameters)
        except ServingError:
            raise
        except SamebitError as error:
            raise InvalidRequestError(str(error)) from None

    def _log_slow(self, call: Call, total_ms: float, timings: Mapping[str, float]) -> None:
        if self._slow_ms is not None and total_ms > self._slow_ms:
            parts = ", ".join(f"{name.removesuffix('_ms')} {value:.1f}" for name, value in timings.items())
            _log.warning("Slow request %r: %.1f ms (%s)", call.request_id, total_ms, parts)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    begin = time.perf_counter()
    value = work()
    return value, (time.perf_counter() - begin) * 1e3
