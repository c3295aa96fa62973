"""The server that KEDA's operator calls, as a task that the autoscaler stands on."""

from __future__ import annotations

import asyncio

import pytest

from router.autoscaler.board import Board
from router.autoscaler.keda_server import KedaServer
from router.autoscaler.rules import Targets
from tests.broken_grpc import breaks_when

TARGETS = Targets(queued_tokens=1, prefill_rate=1, kv_usage=0.5, requests=1)


async def test_it_runs_as_long_as_its_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = asyncio.Event()
    breaks_when(broken, monkeypatch)
    server = KedaServer("127.0.0.1:0", Board(), TARGETS)
    running = asyncio.create_task(server.run())
    await asyncio.sleep(0.05)
    assert not running.done()
    broken.set()
    with pytest.raises(RuntimeError, match="the main loop is broken"):
        await asyncio.wait_for(running, 60)
    await server.close()


async def test_it_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    server = KedaServer("127.0.0.1:0", Board(), TARGETS)
    running = asyncio.create_task(server.run())
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(server.close(), 60)
