"""Work that hangs: a thread that waits for a dead file system can't be stopped, but need not be waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Work = TypeVar("Work")

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.02, 0.5


class OverdueWatch(Generic[Work]):
    """Watches what a few threads have under way, and tells once what is overdue.

        worker thread   begin(work) ───────────────── hangs ─────────────────▶ end(work)
        watch                          deadline ▶ give_up(work)

    While all threads hang nothing that is queued can begin, and `give_up_queued` is called again and again.
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
        self._deadlines: dict[int, tuple[Work, float]] = {}  # by id, of what is under way and not given up
        self._num_hung = 0  # given up, and not ended
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
        return self._num_hung >= self._num_threads

    def begin(self, work: Work, deadline: float) -> None:
        """`deadline` as of time.monotonic()."""
        with self._changed:
            self._deadlines[id(work)] = (work, deadline)
            if self._is_idle:
                self._changed.notify()

    def end(self, work: Work) -> None:
        with self._changed:
            if self._deadlines.pop(id(work), None) is None:
                self._num_hung -= 1

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = not self._deadlines and not self._num_hung
                self._changed.wait(None if self._is_idle else self._interval_s)
                if self._is_closed:
                    return
                now = time.monotonic()
                for key, (work, deadline) in list(self._deadlines.items()):
                    if now >= deadline:
                        del self._deadlines[key]
                        self._num_hung += 1
                        self._give_up(work)
            if self.is_stuck:
                self._give_up_queued()
