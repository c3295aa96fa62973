"""How requests come to a router."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque

from bench.router.clients import Asked, Client, ask


async def closed_loop(client: Client, num_streams: int, max_tokens: int, seconds: float) -> list[Asked]:
    """`num_streams` requests at any time for `seconds`; the last of them are waited for."""
    end = time.perf_counter() + seconds
    asked: list[Asked] = []

    async def one_after_another(stream: int) -> None:
        while True:
            asked.append(await ask(client, stream, max_tokens))
            if time.perf_counter() >= end:
                return

    async with asyncio.TaskGroup() as group:
        for stream in range(num_streams):
            group.create_task(one_after_another(stream))
    return asked


async def open_loop(client: Client, rate: float, max_tokens: int, seconds: float) -> list[Asked]:
    """Requests come at random, `rate` of them a second on average, whatever is still being answered: at least one,
    and the same ones at every call. The last of them are waited for."""
    generator = random.Random(1)
    free: deque[int] = deque()  # streams whose answer is whole; the one that was idle longest goes first, so that
    # its connection is used before a server closes it for being idle
    num_streams = 0
    asked: list[Asked] = []

    async def on_a_free_stream() -> None:
        nonlocal num_streams
        if free:
            stream = free.popleft()
        else:
            stream = num_streams
            num_streams += 1
        asked.append(await ask(client, stream, max_tokens))
        free.append(stream)

    begin, due_s = time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        while due_s < seconds:
            await asyncio.sleep(begin + due_s - time.perf_counter())
            group.create_task(on_a_free_stream())
            due_s += generator.expovariate(rate)
    return asked


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]
