"""The gate's arithmetic, with a clock of its own. What clients see of it is in `test_limits`."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import OverloadedError
from router.limits.gate import MAX_DELAY_S, Gate, GateLimits


def refuse(gate: Gate) -> float:
    """The delay of one refusal, in seconds."""
    with pytest.raises(OverloadedError) as caught, gate.requests(""):
        pass
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_the_more_are_refused_the_later_they_come_again() -> None:
    now = [0.0]
    gate = Gate(GateLimits(max_requests=10), clock=lambda: now[0])
    with gate.requests("", 10):
        assert refuse(gate) == 1.0
        delays = [refuse(gate) for _ in range(99)]
        assert delays == sorted(delays)
        assert sum(delay < 2.0 for delay in delays) == 9  # with the first, as many as there are places
        assert delays[-1] == pytest.approx(1 + 99 / 10)
        now[0] += 4.0
        assert refuse(gate) == pytest.approx(1 + 60 / 10)
        for _ in range(1000):
            refuse(gate)
        assert refuse(gate) == MAX_DELAY_S
        now[0] += 1000.0
        assert refuse(gate) == 1.0
    with gate.requests("", 10):
        pass


async def test_messages_of_one_key_that_never_come_leave_others_room() -> None:
    gate = Gate(GateLimits(max_buffered_bytes=4, max_message_bytes=1))

    async def never_comes(key: str) -> None:
        async with gate.reading(key):
            await asyncio.Event().wait()

    waiting = [asyncio.create_task(never_comes("slow")) for _ in range(10)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60), gate.reading("other"), gate.reading("other"):
        pass
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    async with asyncio.timeout(60), gate.reading("slow"), gate.reading("slow"):
        pass
