"""Who decides when the next request is sent: the clock (open loop) or the answers (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


@dataclass(slots=True, frozen=True)
class Sent(Generic[ResultT]):
    """One request of an open loop. Times are of `time.perf_counter()`."""

    due: float  # when it was to be sent: latencies count from here
    sent: float
    ended: float
    result: ResultT

    @property
    def lag_s(self) -> float:
        """How late the load generator was. If lags are not far below the latencies, the generator was measured."""
        return self.sent - self.due

    @property
    def latency_s(self) -> float:
        """What a user waits who comes at the scheduled time, whether or not the generator was late."""
        return self.ended - self.due


async def open_loop(
    due_s: Sequence[float], ask: Callable[[int], Awaitable[ResultT]], *, max_in_flight: int | None = None
) -> list[Sent[ResultT]]:
    """Calls `ask(number)` for each request, `due_s` (in order) after the start, whatever is still being answered, and
    returns when all have ended, in the order of `due_s`. With `max_in_flight` further requests wait; their lag includes
    that. An error of `ask` ends the run.
    """
    room = None if max_in_flight is None else asyncio.Semaphore(max_in_flight)
    start = time.perf_counter()

    async def send(number: int) -> Sent[ResultT]:
        if room is not None:
            await room.acquire()
        sent = time.perf_counter()
        try:
            result = await ask(number)
            return Sent(start + due_s[number], sent, time.perf_counter(), result)
        finally:
            if room is not None:
                room.release()

    tasks: list[asyncio.Task[Sent[ResultT]]] = []
    async with asyncio.TaskGroup() as group:
        for number, due in enumerate(due_s):
            await asyncio.sleep(max(start + due - time.perf_counter(), 0.0))
            tasks.append(group.create_task(send(number)))
    return [task.result() for task in tasks]


async def closed_loop(num_streams: int, seconds: float, ask: Callable[[int], Awaitable[ResultT]]) -> list[ResultT]:
    """`num_streams` requests at any time for `seconds`, each stream at least one; the last of them are waited for.
    `ask` gets the stream's number."""
    end = time.perf_counter() + seconds
    results: list[ResultT] = []

    async def one_after_another(stream: int) -> None:
        while True:
            results.append(await ask(stream))
            if time.perf_counter() >= end:
                return

    async with asyncio.TaskGroup() as group:
        for stream in range(num_streams):
            group.create_task(one_after_another(stream))
    return results
