"""A server looks for garbage rarely, and still finds it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli import serve
from baton.stack import worker_process
from common.config import RouterSettings, WorkerSettings
from common.process.garbage_collection import LOOKS_BETWEEN, YOUNG_OBJECTS, look_rarely
from common.types import WorkerRole


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_a_router_that_is_ready_looks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    monkeypatch.setattr("router.server.run", lambda _settings, ready, _file: ready("http", "grpc"))
    monkeypatch.setattr("baton.cli.serve.setup_logging", lambda *_args, **_kwargs: None)
    assert serve.router(RouterSettings(decode="127.0.0.1:1"), file=None) == 0
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    assert gc.get_freeze_count() > before


def test_a_worker_that_is_ready_looks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()

    async def serve_nothing(*args: Any) -> int:
        *_, ready, _start_engine = args
        ready("127.0.0.1:1")  # it answers there
        return 0

    monkeypatch.setattr("baton.stack.worker_process.serve", serve_nothing)
    monkeypatch.setattr("baton.stack.worker_process.setup_logging", lambda *_args, **_kwargs: None)
    monkeypatch.setattr("baton.stack.worker_process.ensure_model", lambda *_args: Path("model"))
    assert worker_process.main(WorkerSettings(connector="shared_storage"), WorkerRole.DECODE) == 0
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    assert gc.get_freeze_count() > before


def test_garbage_is_still_found() -> None:
    look_rarely()
    ring = weakref.ref(Ring())
    kept: list[list[int]] = [[] for _ in range(1000)]
    assert ring() is not None, "it would be gone by Python's defaults"
    kept += [[] for _ in range(YOUNG_OBJECTS + 1)]
    assert ring() is None


def test_garbage_that_was_in_use_during_a_look_is_found_soon() -> None:
    """By Python's defaults only when there is a quarter as much of it as of all modules' objects."""
    look_rarely()
    request = Ring()
    ring = weakref.ref(request)
    kept: list[list[int]] = [[] for _ in range(2 * YOUNG_OBJECTS)]
    del request
    for _ in range(2 * (LOOKS_BETWEEN + 1) ** 2):
        kept = [[] for _ in range(YOUNG_OBJECTS + 1)]
    assert kept
    assert ring() is None
