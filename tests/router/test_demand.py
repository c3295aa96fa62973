"""What routers tell the autoscaler."""

from __future__ import annotations

import asyncio

import pytest

from router.limits.demand import Demand


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_reader_ends_although_news_comes_with_its_cancellation(num_turns: int) -> None:
    """`num_turns`: of the event loop between the two."""
    demand = Demand()

    async def follow() -> None:
        while True:
            await demand.news()

    task = asyncio.create_task(follow())
    await asyncio.sleep(0.01)
    demand.tell()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.5)
    task.cancel()
    assert done
