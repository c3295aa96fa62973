"""What a router stands on: its end is the router's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.config import RouterSettings
from common.errors import InternalError
from router.reload import SettingsFile
from router.server import serve
from tests.broken_grpc import breaks_when
from tests.router.conftest import SETTINGS
from tests.support.fake_worker import FakeWorker


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


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ("router.server.WebServer.run", "rest"),
        ("router.server._watch_health", "health"),
        ("router.server._watch_settings", "settings"),
        ("router.server._discover", "discovery"),
        ("router.fleet.registry.WorkerWatch.run", "watch 127.0.0.1:1"),
        ("router.fleet.registry.BlockWatch.sweep", "blocks of former workers"),
    ],
)
async def test_a_router_ends_with_a_task_that_it_stands_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, name: str
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(broken, fail)
    settings = RouterSettings.model_validate({**SETTINGS, "decode": ("127.0.0.1:1",), "drain_timeout": 1.0})
    (tmp_path / "baton.yaml").touch()
    file = SettingsFile(str(tmp_path / "baton.yaml"), lambda: settings)
    with pytest.raises(InternalError, match=f"the task '{name}' ended: ValueError: a defect"):
        await asyncio.wait_for(serve(settings, file=file), 60)
