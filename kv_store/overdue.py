"""Notices work that hangs: a thread that waits for a dead file system cannot be stopped, but others need not wait for
it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Work = TypeVar("Work")

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.02, 0.5


@dataclass(slots=True)
class _UnderWay(Generic[Work]):
    work: Work
    deadline: float  # time.monotonic()
    hangs_at: float  # time.monotonic() from which its thread counts as hung
    is_given_up: bool = False


class OverdueWatch(Generic[Work]):
    """Watches what a few threads have under way, and tells once what is overdue.

        worker thread   begin(work) ───────────────── hangs ─────────────────▶ end(work)
        watch                          deadline ▶ give_up(work)

    A thread counts as hung if its work takes longer than the timeout, whatever the work's deadline. While all threads
    hang, queued work cannot begin, and `give_up_queued` is called again and again.
    """

    def __init__(
        self, num_threads: int, timeout_s: float, give_up: Callable[[Work], None], give_up_queued: Callable[[], None]
    ) -> None:
        """Both are called from the watch's own thread; `give_up` never after that work's `end` has returned."""
        self._num_threads = num_threads
        self._interval_s = min(max(timeout_s / 10, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
        self._give_up = give_up
        self._give_up_queued = give_up_queued
        self._changed = threading.Condition()
        self._timeout_s = timeout_s
        self._under_way: dict[int, _UnderWay[Work]] = {}  # by the work's id
        self._hung: set[int] = set()  # ids of work that has been under way for longer than the timeout
        self._is_idle = False
        self._is_closed = False

    def start(self) -> threading.Thread:
        """The watch's thread, which ends after `close`."""
        thread = threading.Thread(target=self._run, name="kv-io-watch", daemon=True)
        thread.start()
        return thread

    @property
    def is_stuck(self) -> bool:
        """Whether every thread hangs."""
        return len(self._hung) >= self._num_threads

    def begin(self, work: Work, deadline: float) -> None:
        """`deadline` as of time.monotonic()."""
        with self._changed:
            self._under_way[id(work)] = _UnderWay(work, deadline, time.monotonic() + self._timeout_s)
            if self._is_idle:
                self._changed.notify()

    def end(self, work: Work) -> None:
        with self._changed:
            del self._under_way[id(work)]
            self._hung.discard(id(work))

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                self._is_idle = not self._under_way
                self._changed.wait(None if self._is_idle else self._interval_s)
                now = time.monotonic()
                for key, one in self._under_way.items():
                    if now >= one.deadline and not one.is_given_up:
                        one.is_given_up = True
                        self._give_up(one.work)
                    if now >= one.hangs_at:
                        self._hung.add(key)
            if self.is_stuck:
                self._give_up_queued()
