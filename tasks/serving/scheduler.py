"""Work of many clients in one thread: fair, bounded, and given up when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from tasks.serving.errors import BusyError, ExpiredError, SupersededError, UnavailableError

T = TypeVar("T")

_EXPIRED = "the deadline passed before there were actions"


@dataclass(frozen=True)
class Done(Generic[T]):
    """queued_ms: how long the job waited for the worker."""

    value: T
    queued_ms: float


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    client: Hashable
    future: asyncio.Future[Done[Any]]
    arrived: float = field(default_factory=time.perf_counter)


class Scheduler:
    """Runs jobs one at a time in a thread of its own. All methods belong to one event loop.

    Clients take turns; jobs of one client run in order. capacity: jobs that may wait. latest_wins: a
    newer job of a client answers its older ones, waiting or running, with `SupersededError`.
    """

    def __init__(self, *, capacity: int, latest_wins: bool) -> None:
        self._capacity = capacity
        self._latest_wins = latest_wins
        self._waiting: OrderedDict[Hashable, deque[_Job]] = OrderedDict()
        self._running: _Job | None = None
        self._chore: Future[object] | None = None
        self._closed = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inference")

    @property
    def waiting(self) -> int:
        """Jobs that wait for the worker."""
        return sum(len(jobs) for jobs in self._waiting.values())

    async def run(self, work: Callable[[], T], *, client: Hashable, deadline: float | None = None) -> Done[T]:
        """Run `work` when it is this client's turn. A cancelled call leaves the queue.

        deadline: loop time after which the answer is of no use.
        Raises: BusyError, UnavailableError at once; SupersededError; ExpiredError at the deadline, whether
            the work has begun or not; what `work` raises.
        """
        if self._closed:
            raise UnavailableError("the server has stopped; try another one")
        loop = asyncio.get_running_loop()
        if deadline is not None and loop.time() >= deadline:
            raise ExpiredError(_EXPIRED)
        if self._latest_wins:
            self._supersede(client)
        if self.waiting >= self._capacity:
            raise BusyError(f"{self.waiting} requests wait already; try again later")
        job = _Job(work, client, loop.create_future())
        self._waiting.setdefault(client, deque()).append(job)
        self._start_next()
        try:
            async with asyncio.timeout_at(deadline) as limit:
                return await job.future
        except TimeoutError:
            if not limit.expired():
                raise
            raise ExpiredError(_EXPIRED) from None
        finally:
            self._leave(job)

    def run_between_jobs(self, chore: Callable[[], object]) -> None:
        """In the worker's thread as soon as it is free, unless the one before has still to run."""
        if not self._closed and (self._chore is None or self._chore.done()):
            self._chore = self._worker.submit(chore)

    def close(self) -> None:
        """Wait until the thread ends with the job it is at. What waits is never run."""
        self._closed = True
        self._worker.shutdown(cancel_futures=True)

    def _supersede(self, client: Hashable) -> None:
        older = list(self._waiting.get(client, ()))
        if self._running is not None and self._running.client == client:
            older.append(self._running)
        for job in older:
            self._leave(job)
            if not job.future.done():
                job.future.set_exception(SupersededError("a newer observation of this client took its place"))

    def _leave(self, job: _Job) -> None:
        jobs = self._waiting.get(job.client, deque())
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.client]

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting or self._closed:
            return
        client, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[client] = jobs  # behind the other clients
        self._running = job
        queued_ms = (time.perf_counter() - job.arrived) * 1e3
        working = asyncio.get_running_loop().run_in_executor(self._worker, job.work)
        working.add_done_callback(partial(self._finish, job, queued_ms))

    def _finish(self, job: _Job, queued_ms: float, working: asyncio.Future[Any]) -> None:
        self._running = None
        error = None if working.cancelled() else working.exception()
        if not job.future.done():
            if working.cancelled():
                job.future.cancel()
            elif error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(Done(working.result(), queued_ms))
        self._start_next()
