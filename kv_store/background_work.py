"""Tasks of a store whose results nobody waits for: one thread does them, one after the other.

If the store hangs, tasks that would queue up behind the hanging one are dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_WAITING = 64


class BackgroundWork:
    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called after each task."""
        self._wake = wake
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._is_closed = False

    def start(self) -> threading.Thread:
        """Starts the thread, which ends after `close`."""
        thread = threading.Thread(target=self._run, name="kv-background", daemon=True)
        thread.start()
        return thread

    def add(self, task: Callable[[], None]) -> bool:
        """Returns False if the task is dropped, as too many wait already."""
        if self._queue.qsize() >= MAX_WAITING:
            return False
        self._queue.put(task)
        return True

    def close(self) -> None:
        """Ends the thread once the task under way has returned. Queued tasks are not done."""
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None and not self._is_closed:
            try:
                task()
            except Exception:  # the next task may succeed
                log.exception("background work of a store failed")
            self._wake()
