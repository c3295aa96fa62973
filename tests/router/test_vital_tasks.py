"""What a router stands on: its end is the router's."""

from __future__ import annotations

import asyncio

import pytest

from common.config import RouterSettings
from common.errors import InternalError
from router.server import serve
from tests.broken_grpc import breaks_when
from tests.router.conftest import SETTINGS
from tests.router.fake_worker import FakeWorker


@pytest.mark.parametrize("is_broken", [True, False])
async def test_a_router_ends_with_its_grpc_server(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """With an error, and without one if it was told to end."""
    broken, stop = asyncio.Event(), asyncio.Event()
    breaks_when(broken, monkeypatch)
    settings = RouterSettings.model_validate(
        {**SETTINGS, "decode": (worker.address,), "health_listen": "127.0.0.1:0", "drain_timeout": 1.0}
    )
    ended = broken if is_broken else stop
    running = asyncio.create_task(serve(settings, lambda *_: ended.set(), stop))
    if is_broken:
        with pytest.raises(InternalError, match="the main loop is broken"):
            await asyncio.wait_for(running, 60)
    else:
        await asyncio.wait_for(running, 60)
