"""What watchers of a worker's blocks are told, whatever their pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from common.errors import OverloadedError, UnavailableError
from worker.block_feed import BlockChange, BlockFeed

A, B, C = (bytes([number]) * 16 for number in range(3))


class Engine:
    """Answers for a list when it is told to."""

    def __init__(self, **bounds: Any) -> None:
        self.num_asked = 0
        self.feed = BlockFeed(self._ask, **bounds)

    def _ask(self) -> None:
        self.num_asked += 1


async def taken(watch: AsyncGenerator[BlockChange, None], num: int) -> list[BlockChange]:
    async with asyncio.timeout(60):
        return [await anext(watch) for _ in range(num)]


async def begun(watch: AsyncGenerator[BlockChange, None], num: int = 1) -> asyncio.Task[list[BlockChange]]:
    task = asyncio.create_task(taken(watch, num))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_a_list_then_changes() -> None:
    engine = Engine(piece_names=2)
    feed = engine.feed
    feed.changed(A, b"")
    first, second = await begun(feed.watch(None), 2), await begun(feed.watch(None), 2)
    feed.changed(B, b"")
    feed.listed(A + B + C)
    expected = [BlockChange(2, A + B, starts_list=True), BlockChange(2, C)]
    assert await first == await second == expected
    assert engine.num_asked == 1, "one list for both"


async def test_who_knows_where_it_stopped_gets_no_list() -> None:
    engine = Engine()
    for name in (A, B, C):
        engine.feed.changed(name, b"")
    watch = engine.feed.watch(1)
    assert await taken(watch, 2) == [BlockChange(2, B), BlockChange(3, C)]
    waiting = await begun(watch)
    engine.feed.changed(b"", A)
    assert await waiting == [BlockChange(4, b"", A)]
    assert engine.num_asked == 0


async def test_who_reads_too_slowly_gets_a_new_list() -> None:
    engine = Engine(max_recent_bytes=3 * BlockChange(1, A).num_bytes)
    watch = engine.feed.watch(0)
    for _ in range(5):
        engine.feed.changed(A, b"")
    waiting = await begun(watch, 2)
    assert engine.num_asked == 1
    engine.feed.listed(A)
    engine.feed.changed(B, b"")
    assert await waiting == [BlockChange(5, A, starts_list=True), BlockChange(6, B)]


async def test_a_sequence_of_the_future_gets_a_list() -> None:
    engine = Engine()
    waiting = await begun(engine.feed.watch(9))
    engine.feed.listed(b"")
    assert await waiting == [BlockChange(0, starts_list=True)]


async def test_watchers_and_waits_are_bounded() -> None:
    engine = Engine(max_watchers=1, list_timeout_s=0.01)
    waiting = await begun(engine.feed.watch(None))
    with pytest.raises(OverloadedError):
        await anext(engine.feed.watch(None))
    with pytest.raises(UnavailableError):
        await waiting
    with pytest.raises(UnavailableError):
        await anext(engine.feed.watch(None))
