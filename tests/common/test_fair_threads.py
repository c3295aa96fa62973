"""Threads whose work waits in turns: what is cancelled, displaced or left at the end fails, and all else is done."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from common.errors import UnavailableError
from common.fair_threads import FairThreads, FullError


class Pool:
    """One thread, with work that takes seconds of a clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.go = threading.Event()
        self.threads = FairThreads(1, "test", max_pending=4, full="too many", clock=lambda: self.now)

    def work(self, name: str, seconds: float = 0.0) -> Callable[[], str]:
        def run() -> str:
            assert self.go.wait(60)
            self.now += seconds
            self.done.append(name)
            return name

        return run


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.go.set()
    pool.threads.close(wait=True)


def test_owners_take_turns_by_the_time_of_their_work(pool: Pool) -> None:
    heavy = [pool.threads.submit("heavy", pool.work(f"heavy {index}", 2.0)) for index in range(3)]
    light = pool.threads.submit("light", pool.work("light", 0.01))
    pool.go.set()
    assert [one.result(60) for one in (*heavy, light)] == ["heavy 0", "heavy 1", "heavy 2", "light"]
    assert pool.done == ["heavy 0", "light", "heavy 1", "heavy 2"]


def test_whoever_has_most_waiting_makes_room(pool: Pool) -> None:
    heavy = [pool.threads.submit("heavy", pool.work(f"heavy {index}")) for index in range(4)]
    with pytest.raises(FullError, match="too many"):
        pool.threads.submit("heavy", pool.work("heavy 4"))
    light = pool.threads.submit("light", pool.work("light"))
    with pytest.raises(FullError, match="too many"):
        heavy[3].result(60)
    pool.go.set()
    assert [one.result(60) for one in (*heavy[:3], light)] == ["heavy 0", "heavy 1", "heavy 2", "light"]


def test_what_is_cancelled_is_not_kept(pool: Pool) -> None:
    class Large:
        def __call__(self) -> None: ...

    first = pool.threads.submit("a", pool.work("first"))
    large = Large()
    kept, left = weakref.ref(large), pool.threads.submit("a", large)
    del large
    assert left.cancel()
    with pytest.raises(CancelledError):
        left.result()
    del left
    gc.collect()
    assert kept() is None
    pool.go.set()
    assert first.result(60) == "first"


def test_failures_are_the_works_own(pool: Pool) -> None:
    def fail() -> None:
        raise LookupError("of the work")

    for _ in range(6):  # the thread goes on
        with pytest.raises(LookupError, match="of the work"):
            pool.threads.submit("a", fail).result(60)


def test_what_waits_at_the_end_fails(pool: Pool) -> None:
    begun = threading.Event()

    def run() -> str:
        begun.set()
        assert pool.go.wait(60)
        return "begun"

    first = pool.threads.submit("a", run)
    assert begun.wait(60)
    second = pool.threads.submit("a", pool.work("second"))
    pool.threads.close()
    for waits in (second.result, lambda: pool.threads.submit("a", pool.work("third"))):
        with pytest.raises(UnavailableError, match="shutting down"):
            waits()
    pool.go.set()
    assert first.result(60) == "begun"
    assert pool.done == []
