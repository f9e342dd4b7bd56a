"""Whose turn it is, and what becomes of work that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tasks.serving.errors import BusyError, ExpiredError, SupersededError, UnavailableError
from tasks.serving.scheduler import Scheduler


class Bench:
    """A scheduler, and work that runs until it is let go."""

    def __init__(self, **options: Any) -> None:
        self.done: list[str] = []
        self.gate = threading.Event()
        self.started = threading.Event()
        self.scheduler = Scheduler(**{"capacity": 100, "latest_wins": False} | options)

    def work(self, name: str) -> str:
        self.done.append(name)
        return name

    def hold(self) -> str:
        self.started.set()
        assert self.gate.wait(30)
        return self.work("hold")

    async def holding(self) -> asyncio.Task[Any]:
        """Occupy the worker."""
        task = asyncio.create_task(self.scheduler.run(self.hold, client="holder"))
        await asyncio.to_thread(self.started.wait, 30)
        return task

    async def submit(self, name: str, client: str, **options: Any) -> asyncio.Task[Any]:
        """In the queue when this returns."""
        task = asyncio.create_task(self.scheduler.run(lambda: self.work(name), client=client, **options))
        await asyncio.sleep(0)
        return task


def scenario(test: Callable[[Bench], Awaitable[None]], **options: Any) -> Bench:
    async def run() -> Bench:
        bench = Bench(**options)
        try:
            await test(bench)
        finally:
            bench.gate.set()
            bench.scheduler.close()
        return bench

    return asyncio.run(run())


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    async def test(bench: Bench) -> None:
        tasks = [await bench.holding()]
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            tasks.append(await bench.submit(name, name[0]))
        bench.gate.set()
        results = await asyncio.gather(*tasks)
        assert [result.value for result in results] == ["hold", "a1", "a2", "a3", "b1", "b2", "c1"]
        assert results[1].queued_ms > 0

    assert scenario(test).done == ["hold", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_one_job_at_a_time_in_one_thread() -> None:
    seen: list[tuple[int, bool]] = []
    running = threading.Lock()

    def work() -> None:
        alone = running.acquire(blocking=False)
        seen.append((threading.get_ident(), alone))
        running.release()

    async def test(bench: Bench) -> None:
        await asyncio.gather(*(bench.scheduler.run(work, client=n) for n in range(50)))

    scenario(test)
    assert len(seen) == 50
    assert len({thread for thread, _ in seen}) == 1
    assert all(alone for _, alone in seen)


def test_a_full_queue_says_so_at_once_and_goes_on() -> None:
    async def test(bench: Bench) -> None:
        holding = await bench.holding()
        first = await bench.submit("first", "a")
        with pytest.raises(BusyError, match="1 requests wait"):
            await bench.scheduler.run(lambda: bench.work("second"), client="b")
        bench.gate.set()
        await asyncio.gather(holding, first)
        assert (await bench.scheduler.run(lambda: bench.work("third"), client="b")).value == "third"

    assert scenario(test, capacity=1).done == ["hold", "first", "third"]


def test_what_nobody_waits_for_leaves_the_queue() -> None:
    async def test(bench: Bench) -> None:
        holding = await bench.holding()
        gone = await bench.submit("gone", "a")
        stays = await bench.submit("stays", "a")
        gone.cancel()
        await asyncio.wait([gone])
        assert bench.scheduler.waiting == 1
        bench.gate.set()
        await asyncio.gather(holding, stays)

    assert scenario(test).done == ["hold", "stays"]


def test_leaving_while_running_harms_nobody() -> None:
    async def test(bench: Bench) -> None:
        holding = await bench.holding()
        after = await bench.submit("after", "b")
        holding.cancel()
        await asyncio.wait([holding])
        bench.gate.set()
        assert (await after).value == "after"

    assert scenario(test).done == ["hold", "after"]


def test_expired_work_is_answered_at_its_deadline_and_not_done() -> None:
    async def test(bench: Bench) -> None:
        holding = await bench.holding()
        now = asyncio.get_running_loop().time()
        late = await bench.submit("late", "a", deadline=now + 0.01)
        with pytest.raises(ExpiredError):
            await late
        assert bench.scheduler.waiting == 0
        with pytest.raises(ExpiredError):
            await bench.scheduler.run(lambda: bench.work("past"), client="a", deadline=now)
        bench.gate.set()
        await holding

    assert scenario(test).done == ["hold"]


def test_a_result_after_its_deadline_is_never_delivered() -> None:
    async def test(bench: Bench) -> None:
        deadline = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(ExpiredError):
            await bench.scheduler.run(bench.hold, client="a", deadline=deadline)
        bench.gate.set()
        assert (await bench.scheduler.run(lambda: bench.work("next"), client="a")).value == "next"

    assert scenario(test).done == ["hold", "next"]


def test_newer_observations_win_over_waiting_and_running_ones_of_their_client() -> None:
    async def test(bench: Bench) -> None:
        running = asyncio.create_task(bench.scheduler.run(bench.hold, client="a"))
        await asyncio.to_thread(bench.started.wait, 30)
        other = await bench.submit("other", "b")
        old = await bench.submit("old", "a")
        new = await bench.submit("new", "a")
        bench.gate.set()
        results = await asyncio.gather(running, other, old, new, return_exceptions=True)
        assert [isinstance(result, SupersededError) for result in results] == [True, False, True, False]

    assert scenario(test, latest_wins=True).done == ["hold", "other", "new"]


def test_errors_of_the_work_reach_who_asked_and_the_next_job_runs() -> None:
    def fail() -> None:
        raise TimeoutError("of its own")

    async def test(bench: Bench) -> None:
        with pytest.raises(TimeoutError, match="of its own"):
            await bench.scheduler.run(fail, client="a")
        assert (await bench.scheduler.run(lambda: bench.work("next"), client="a")).value == "next"

    scenario(test)


def test_chores_run_between_jobs_and_do_not_pile_up() -> None:
    async def test(bench: Bench) -> None:
        tasks = [await bench.holding(), await bench.submit("next", "a")]
        for _ in range(3):
            bench.scheduler.run_between_jobs(lambda: bench.work("chore"))
        bench.gate.set()
        await asyncio.gather(*tasks)

    assert scenario(test).done == ["hold", "chore", "next"]


def test_a_close_waits_for_the_job_under_way_and_nothing_begins_after_it() -> None:
    async def test(bench: Bench) -> None:
        holding, waiting = await bench.holding(), await bench.submit("waiting", "a")
        threading.Timer(0.1, bench.gate.set).start()
        bench.scheduler.close()
        assert bench.done == ["hold"]
        bench.scheduler.run_between_jobs(lambda: bench.work("chore"))
        with pytest.raises(UnavailableError):
            await bench.scheduler.run(lambda: bench.work("late"), client="b")
        assert (await holding).value == "hold"
        waiting.cancel()

    assert scenario(test).done == ["hold"]
