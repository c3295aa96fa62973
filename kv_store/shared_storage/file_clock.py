"""The clock of a file system, which is what the times of its files must be compared with: on a network file system
they come from its server, and hosts' clocks differ."""

from __future__ import annotations

import os
import time
from pathlib import Path


class FileClock:
    """The file system's time of day, in seconds, read off a file once and carried on by this host's monotonic clock.

    Any thread may call `now`.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        """`owner` tells apart those who use `folder` at the same time. Raises `OSError`."""
        self._probe = folder / f".clock-{owner}"
        self._offset = 0.0
        self.set()

    def set(self) -> None:
        """Reads the file system's clock again. Raises `OSError`."""
        fd = os.open(self._probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.utime(fd)  # without a time: the file system sets its own
            self._offset = os.fstat(fd).st_mtime - time.monotonic()
        finally:
            os.close(fd)
            self._probe.unlink(missing_ok=True)

    def now(self) -> float:
        return time.monotonic() + self._offset
