"""The clock of a file system, with which the times of its files must be compared: on a network file system the times
come from its server, and hosts' clocks differ."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kv_store.shared_storage.layout import FULL


class FileClock:
    """The file system's time of day, in seconds, read off a file once and carried on by this host's monotonic clock.

    Any thread may call `now`.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        """`owner` must differ between processes that use `folder` at the same time. Raises `OSError`."""
        self._probe = folder / f".clock-{owner}"
        self._offset = 0.0
        self.set()

    def set(self) -> None:
        """Reads the file system's clock again. Raises `OSError`."""
        try:
            fd = os.open(self._probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._read(self._probe.parent)  # no room for another file; not every file system notes times of folders
            return
        try:
            self._read(fd)
        finally:
            os.close(fd)
            self._probe.unlink(missing_ok=True)

    def _read(self, file: int | Path) -> None:
        os.utime(file)  # without a time: the file system sets its own
        self._offset = os.stat(file).st_mtime - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset
