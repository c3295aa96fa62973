"""Logs failures that come in crowds: while a disk is full or a server is gone, every block fails."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0


class Failures:
    """Logs `message` at most every LOG_INTERVAL_S, with the number of failures since then as `number`. Any thread may
    use it."""

    def __init__(self, message: str, number: str) -> None:
        self._message = message
        self._number = number
        self._lock = threading.Lock()
        self._num_failed = 0  # not logged yet
        self._next_log = 0.0  # time.monotonic()

    def add(self, num_failed: int, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._num_failed += num_failed
            if now < self._next_log:
                return
            self._next_log = now + LOG_INTERVAL_S
            num_failed, self._num_failed = self._num_failed, 0
        log.warning(self._message, extra={self._number: num_failed, "reason": reason})
