"""A lock that any process on any host may hold, made of one file, and that outlives nobody: who holds it touches it,
and a file that was not touched for a while may be taken from its holder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kv_store.shared_storage.file_clock import FileClock
from kv_store.shared_storage.layout import unlink

STALE_S = 10.0
_RENEW_S = 1.0


class FileLease:
    """For work that is merely wasted when two do it at once: a holder that was stopped for longer than STALE_S finds
    out at its next `renew`. Times are the file system's own, so that hosts' clocks don't matter."""

    def __init__(self, path: Path, clock: FileClock, owner: str) -> None:
        """`owner` is this process's and nobody else's."""
        self._path = str(path)
        self._clock = clock
        self._owner = owner.encode()
        self._renewed = 0.0  # time.monotonic()

    def acquire(self) -> bool:
        """False where somebody else holds it. Raises `OSError`."""
        if self._create():
            return True
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)  # opened, since a network file system caches stats
            try:
                touched = os.fstat(fd).st_mtime
            finally:
                os.close(fd)
        except FileNotFoundError:
            return self._create()
        if self._clock.now() - touched < STALE_S:
            return False
        unlink(self._path)
        return self._create()

    def renew(self) -> bool:
        """To be called often while it is held; False where it was taken over. Raises `OSError`."""
        if time.monotonic() - self._renewed < _RENEW_S:
            return True
        if not self._is_ours():
            return False
        os.utime(self._path)
        self._renewed = time.monotonic()
        return True

    def release(self) -> None:
        """Raises `OSError`."""
        if self._is_ours():
            unlink(self._path)

    def _create(self) -> bool:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(fd, self._owner)
        finally:
            os.close(fd)
        self._renewed = time.monotonic()
        return True

    def _is_ours(self) -> bool:
        try:
            with open(self._path, "rb") as file:
                return file.read() == self._owner
        except FileNotFoundError:
            return False
