"""Settings that a running router takes over."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from baton.settings import load
from common.config import RouterSettings
from common.errors import StartupError
from router.fleet.registry import Registry
from router.limits.request_queue import RequestQueue
from router.make_gateway import policy_of
from router.reload import Reload, SettingsFile
from router.running.routes import Routes
from tests.router.conftest import sample
from tests.router.processes.running import running, running_with_file
from tests.router.test_request_queue import Runner
from tests.support.fake_worker import FakeWorker


class Router:
    """The parts of one that change."""

    def __init__(self, path: Path) -> None:
        read = partial(load, RouterSettings, {"http_listen": "127.0.0.1:1"}, environ={}, config=str(path))
        self.settings = read()
        self.queue = RequestQueue(self.settings.max_running)
        self.routes = Routes(Registry([], []), policy_of(self.settings))
        self.reload = Reload(self.settings, SettingsFile(str(path), read), self.routes, self.queue)


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "router.yaml"
    write(path, "max_running: 1")
    return path


async def test_what_may_change_is_taken_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    router = Router(path)
    runner, before = Runner(router.queue), router.routes.policy
    await runner.add("a1")
    await runner.add("a2")
    router.reload.look()
    assert runner.order == ["a1"]
    assert router.routes.policy is before
    with caplog.at_level("INFO"):
        write(path, "{max_running: 2, policy: session, slo_late: refuse, request_timeout: 5, http_listen: 127.0.0.1:2}")
        router.reload.look()
    await asyncio.sleep(0)
    assert runner.order == ["a1", "a2"]
    assert router.routes.policy is not before
    lines = {record.getMessage(): record.__dict__.get("settings") for record in caplog.records}
    assert router.routes.late.refuses
    assert lines["settings changed"] == "max_running, policy, slo_late"
    assert lines["settings changed that need a restart"] == "request_timeout", "a flag wins over the file"
    write(path, "policy: session")
    router.reload.look()
    assert not router.routes.late.refuses
    for name in ("b1", "b2", "b3"):
        await runner.add(name)
    assert runner.order == ["a1", "a2", "b1", "b2", "b3"]
    await runner.end_all()


@pytest.mark.parametrize("text", ["policy: fastest", "max_running: -1", "[", "colour: red"])
async def test_a_file_of_no_use_changes_nothing(path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    router = Router(path)
    before = sample("baton_file_reloads_total", what="settings", outcome="failed")
    policy = router.routes.policy
    write(path, text + " ")
    router.reload.look()
    router.reload.look()
    assert router.routes.policy is policy
    assert sample("baton_file_reloads_total", what="settings", outcome="failed") == before + 1
    assert "changed files cannot be used" in caplog.text
    read = partial(load, RouterSettings, {}, environ={}, config=str(path))
    with pytest.raises(StartupError):
        Reload(router.settings, SettingsFile(str(path), read), router.routes, router.queue)


async def test_the_level_of_the_log(path: Path) -> None:
    router, level = Router(path), logging.getLogger().level
    try:
        write(path, "log_level: error")
        router.reload.look()
        assert logging.getLogger().level == logging.ERROR
    finally:
        logging.getLogger().setLevel(level)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
@pytest.mark.slow
async def test_sighup(worker: FakeWorker, path: Path) -> None:
    async with running_with_file(path, worker.address) as router:
        write(path, "{max_running: 2, drain_timeout: 1}")
        os.kill(router.process.pid, signal.SIGHUP)
        await router.said(b"need a restart settings=drain_timeout")
        router.process.terminate()
        assert await router.ended() == 0


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
async def test_sighup_without_a_settings_file(worker: FakeWorker, tmp_path: Path, processes: int) -> None:
    limits, keys = tmp_path / "limits.yaml", tmp_path / "keys"
    limits.write_text("{}")
    keys.write_text("sk-one")
    files = {"limits_file": str(limits), "api_keys_file": str(keys)}
    async with running(decode=[worker.address], processes=processes, **files) as router:
        os.kill(router.process.pid, signal.SIGHUP)
        await router.said(b"there is no settings file", processes)
        limits.write_text("default: {streams: 1}")
        keys.write_text("sk-one\nsk-two")
        os.kill(router.process.pid, signal.SIGHUP)
        await router.said(b"files were read again", 2 * processes)
        async with router.client() as client:
            assert (await client.get("/health")).status_code == 200
        router.process.terminate()
        assert await router.ended() == 0
