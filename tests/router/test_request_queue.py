"""Who goes next, who is refused, and that every place is given back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from common.errors import DeadlineError, OverloadedError
from router.limits.clients import ApiClient
from router.limits.request_queue import RequestQueue


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Runner:
    """Requests that end when they are told to."""

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def add(self, name: str, cost: float = 100, **kwargs: float) -> None:
        """The name's first letter is the tenant."""
        self._ends[name] = asyncio.Event()

        async def run() -> None:
            async with self.queue.place(name[0], cost, **kwargs):  # type: ignore[arg-type]
                self.order.append(name)
                await self._ends[name].wait()

        self.tasks[name] = asyncio.create_task(run())
        await settled()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settled()

    async def end_all(self) -> list[str]:
        """One after another, in the order in which they began."""
        for index in range(len(self.tasks)):
            if index < len(self.order):
                await self.end(self.order[index])
        return self.order


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_a_limit_nobody_waits() -> None:
    runner = Runner(RequestQueue(None))
    for name in ("a1", "a2", "b1"):
        await runner.add(name)
    assert runner.order == ["a1", "a2", "b1"]
    await runner.end_all()


async def test_tenants_take_turns_whatever_their_backlog() -> None:
    runner = Runner(RequestQueue(1))
    for name in ("a1", "a2", "a3", "a4", "b1", "b2"):
        await runner.add(name)
    assert await runner.end_all() == ["a1", "b1", "a2", "b2", "a3", "a4"]
    assert runner.queue.num_waiting == 0


async def test_large_requests_and_weights_count() -> None:
    runner = Runner(RequestQueue(1))
    await runner.add("x1")
    for name in ("a1", "a2", "a3"):
        await runner.add(name, cost=300)
    for name in ("b1", "b2", "b3", "b4"):
        await runner.add(name, cost=100)
    for name in ("c1", "c2", "c3"):
        await runner.add(name, cost=300, weight=3)
    assert " ".join(await runner.end_all()) == "x1 a1 b1 c1 b2 c2 b3 c3 a2 b4 a3"


async def test_priority_goes_first() -> None:
    runner = Runner(RequestQueue(1))
    await runner.add("a1")
    await runner.add("a2")
    await runner.add("b1", priority=1)
    await runner.add("b2", priority=1)
    assert await runner.end_all() == ["a1", "b1", "b2", "a2"]


async def test_a_full_queue_takes_from_who_has_most() -> None:
    runner = Runner(RequestQueue(1, max_waiting=3))
    for name in ("a1", "a2", "a3", "a4"):
        await runner.add(name)
    await runner.add("a5")
    with pytest.raises(OverloadedError, match="3 requests wait already"):
        await runner.tasks["a5"]
    await runner.add("b1")
    with pytest.raises(OverloadedError):
        await runner.tasks["a4"]
    assert await runner.end_all() == ["a1", "b1", "a2", "a3"]


async def test_what_would_wait_too_long_is_refused_at_once() -> None:
    clock = Clock()
    runner = Runner(RequestQueue(1, max_wait_s=10, clock=clock))
    for name in ("a1", "a2", "a3", "a4", "a5"):
        await runner.add(name)
    for name in ("a1", "a2"):
        clock.now += 4
        await runner.end(name)
    await runner.add("a6")
    with pytest.raises(OverloadedError, match="a place is free in about 12 s") as caught:
        await runner.tasks["a6"]
    assert caught.value.retry_after_s == 2
    await runner.add("b1")
    assert not runner.tasks["b1"].done(), "who has nothing waiting does not wait for another's backlog"
    await runner.end_all()


async def test_who_goes_away_leaves_no_hole() -> None:
    runner = Runner(RequestQueue(1, max_wait_s=1.0))
    for name in ("a1", "a2", "b1", "c1"):
        await runner.add(name)
    runner.tasks["a2"].cancel()
    await settled()
    assert runner.queue.num_waiting == 2
    runner._ends["a1"].set()
    runner.tasks["b1"].cancel()  # at the moment in which its turn comes, or just before
    await settled()
    assert runner.order == ["a1", "c1"]
    await runner.add("d1")
    with pytest.raises(OverloadedError, match=r"waited 1 s"):
        await runner.tasks["d1"]
    await runner.add("e1", left_s=0.01)
    with pytest.raises(DeadlineError):
        await runner.tasks["e1"]
    await runner.end("c1")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(runner.queue.place("z", 1))
    assert runner.queue._num_running == runner.queue.num_waiting == 0


async def test_a_full_queue_takes_nothing_from_who_is_about_to_leave() -> None:
    runner = Runner(RequestQueue(1, max_waiting=2))
    for name in ("a1", "a2", "a3"):
        await runner.add(name)
    runner.tasks["a3"].cancel()  # it has not noticed yet when the next one comes
    async with asyncio.timeout(60):
        task = asyncio.create_task(runner.add("b1"))
        await task
    assert not runner.tasks["b1"].done()
    assert await runner.end_all() == ["a1", "b1", "a2"]
    assert runner.queue._num_running == runner.queue.num_waiting == 0


async def test_requests_of_a_tenant_go_by_their_own_priority() -> None:
    clock = Clock()
    runner = Runner(RequestQueue(1, max_waiting=4, clock=clock))
    await runner.add("a1")
    await runner.add("a2")
    await runner.add("a3", request_priority=-1)
    await runner.add("b1")
    clock.now = 11  # whoever waits for more than ten seconds is not overtaken by a step
    await runner.add("a4", request_priority=-1)
    await runner.add("a5", request_priority=-2)
    with pytest.raises(OverloadedError):
        await runner.tasks["a4"]
    await runner.add("a6", request_priority=5)
    with pytest.raises(OverloadedError):
        await runner.tasks["a6"]
    assert await runner.end_all() == ["a1", "b1", "a3", "a5", "a2"]


def test_a_key_is_not_the_tenant_of_its_name() -> None:
    assert ApiClient("lab").owner != ApiClient("ann", "lab").owner == ApiClient("bob", "lab").owner
