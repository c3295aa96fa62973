"""Chores of a store that nobody waits for: one thread does them, one after the other.

If the store hangs, chores that would queue up behind the one that hangs are dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_CHORES = 64


class Chores:
    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called after each chore."""
        self._wake = wake
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._is_closed = False

    def start(self) -> threading.Thread:
        """Starts the thread, which ends after `close`."""
        thread = threading.Thread(target=self._run, name="kv-chores", daemon=True)
        thread.start()
        return thread

    def add(self, chore: Callable[[], None]) -> bool:
        """Returns False if the chore is dropped, as too many wait already."""
        if self._queue.qsize() >= MAX_CHORES:
            return False
        self._queue.put(chore)
        return True

    def close(self) -> None:
        """Ends the thread once the chore under way has returned. Queued chores are not done."""
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (chore := self._queue.get()) is not None and not self._is_closed:
            try:
                chore()
            except Exception:  # the next one may do better
                log.exception("a store's chore failed")
            self._wake()
