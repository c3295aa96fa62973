"""What routers tell the autoscaler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.limits.demand import Demand
from router.processes.shared_demand import SharedDemand
from router.processes.shared_ledger import SharedLedger


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


async def test_batches_hear_of_clients_in_every_process(tmp_path: Path) -> None:
    """Requests of batches do not count, of whichever process they are."""
    ledgers = [SharedLedger(str(tmp_path), 2, process) for process in range(2)]
    one, other = (SharedDemand(ledger, "e") for ledger in ledgers)
    changes = []
    one.changed = lambda: changes.append(one.num_of_clients)
    sharing = [asyncio.create_task(demand.keep_shared()) for demand in (one, other)]
    one.num_running = one.num_of_batches = 2
    other.num_running, other.num_of_batches = 5, 1
    async with asyncio.timeout(20):
        while not changes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert changes == [4]
        other.num_running = 1
        while len(changes) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert changes == [4, 0]
    one.num_running += 1
    assert one.num_of_clients == 1, "its own, at once"
    for task in sharing:
        task.cancel()
    await asyncio.gather(*sharing, return_exceptions=True)
    for ledger in ledgers:
        ledger.close()
