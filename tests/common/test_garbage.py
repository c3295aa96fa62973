"""A server looks for garbage rarely, and still finds it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from baton.cli import serve
from common.config import RouterSettings
from common.garbage import YOUNG_OBJECTS, look_rarely


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_a_router_that_is_ready_looks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.server.run", lambda _settings, ready, _file: ready("http", "grpc"))
    monkeypatch.setattr("baton.cli.serve.setup_logging", lambda *_args, **_kwargs: None)
    assert serve.router(RouterSettings(decode="127.0.0.1:1"), file=None) == 0
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    assert gc.get_freeze_count() > 0


def test_garbage_is_still_found() -> None:
    look_rarely()
    ring = weakref.ref(Ring())
    kept: list[list[int]] = [[] for _ in range(1000)]
    assert ring() is not None, "it would be gone by Python's defaults"
    kept += [[] for _ in range(YOUNG_OBJECTS + 1)]
    assert ring() is None
