from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kv_store.overdue import OverdueWatch
from tests.kv_store.blocks import PATIENCE_S
from tests.kv_store.conformance import wait_until

FAR = PATIENCE_S * 10


class Told:
    def __init__(self) -> None:
        self.given_up: list[str] = []
        self.num_queued = 0

    def give_up_queued(self) -> None:
        self.num_queued += 1


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def watch(told: Told) -> Iterator[OverdueWatch[str]]:
    watch: OverdueWatch[str] = OverdueWatch(2, 0.2, told.given_up.append, told.give_up_queued)
    thread = watch.start()
    yield watch
    watch.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def at(seconds: float) -> float:
    return time.monotonic() + seconds


def test_what_is_overdue_is_told_once(told: Told, watch: OverdueWatch[str]) -> None:
    watch.begin("late", at(0.05))
    watch.begin("good", at(FAR))
    wait_until(lambda: told.given_up == ["late"])
    time.sleep(0.1)
    assert told.given_up == ["late"]
    assert not watch.is_stuck
    watch.end("late")
    watch.end("good")
    time.sleep(0.1)
    assert (told.given_up, told.num_queued) == (["late"], 0)


def test_what_ends_in_time_is_not_told(told: Told, watch: OverdueWatch[str]) -> None:
    watch.begin("one", at(0.5))
    watch.end("one")
    watch.begin("two", at(0.5))
    wait_until(lambda: bool(told.given_up))
    assert told.given_up == ["two"], "the first one's time came before"


def test_stuck_until_one_goes_on(told: Told, watch: OverdueWatch[str]) -> None:
    for name in ("one", "two"):
        watch.begin(name, at(0.0))
    wait_until(lambda: watch.is_stuck)
    num_queued = told.num_queued
    wait_until(lambda: told.num_queued > num_queued + 1)
    watch.end("two")
    assert not watch.is_stuck
    watch.begin("three", at(0.0))
    wait_until(lambda: watch.is_stuck)


def test_what_was_begun_late_is_overdue_and_does_not_hang_yet(told: Told) -> None:
    watch: OverdueWatch[str] = OverdueWatch(1, FAR, told.given_up.append, told.give_up_queued)
    thread = watch.start()
    watch.begin("late", at(0.0))
    wait_until(lambda: told.given_up == ["late"])
    assert not watch.is_stuck
    watch.close()
    thread.join(PATIENCE_S)
    assert told.num_queued == 0


def test_a_watch_that_was_closed_before_it_began_ends(told: Told) -> None:
    watch: OverdueWatch[str] = OverdueWatch(1, FAR, told.given_up.append, told.give_up_queued)
    watch.close()
    thread = watch.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_nothing_is_told_after_the_end(told: Told) -> None:
    """However they meet: the watch may be telling when the work ends."""
    ended: list[str] = []
    too_late: list[str] = []

    def give_up(name: str) -> None:
        time.sleep(0.0001)
        if name in ended:
            too_late.append(name)
        told.given_up.append(name)

    watch: OverdueWatch[str] = OverdueWatch(1, 0.0, give_up, told.give_up_queued)
    thread = watch.start()
    names = [f"work {number}" for number in range(200)]

    def work(part: list[str]) -> None:
        for name in part:
            watch.begin(name, at(0.02))
            time.sleep(0.02)
            watch.end(name)
            ended.append(name)

    workers = [threading.Thread(target=work, args=(part,)) for part in (names[::2], names[1::2])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    watch.close()
    thread.join(PATIENCE_S)
    assert too_late == []
    assert not watch.is_stuck
