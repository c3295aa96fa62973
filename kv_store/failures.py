"""Logs failures that come in crowds: while a disk is full or a server is gone, every block fails."""

from __future__ import annotations

import logging

from common.logs import RareLine

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0


class Failures:
    """Logs `message` at most every LOG_INTERVAL_S, with the number of failures since then as `number`. Any thread may
    use it."""

    def __init__(self, message: str, number: str) -> None:
        self._line = RareLine(log, message, level=logging.WARNING, number=number, interval_s=LOG_INTERVAL_S)

    def add(self, num_failed: int, reason: str) -> None:
        self._line.happened({"reason": reason}, num_failed)
