"""A lock in the form of one file, which a process on any host may hold. The holder touches the file now and then; if it
has not done so for STALE_S, another process may take the lock over."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from kv_store.shared_storage.file_clock import FileClock
from kv_store.shared_storage.layout import unlink

STALE_S = 10.0
_RENEW_S = 1.0


class FileLease:
    """Only for work that is merely wasted if two processes do it at once: a holder that was stopped for longer than
    STALE_S notices the takeover only at its next `renew`. Times are the file system's own, so that hosts' clocks don't
    matter.

    The file is empty, so that a full disk can still be cleaned. The holder keeps the file open, to recognise it.
    """

    def __init__(self, path: Path, clock: FileClock) -> None:
        self._path = str(path)
        self._clock = clock
        self._fd: int | None = None  # the file, while we hold it
        self._renewed = 0.0  # time.monotonic()

    def acquire(self) -> bool:
        """False if somebody else holds it. Raises `OSError`."""
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
        """Call it often while the lock is held. Returns False if another process has taken the lock over. Raises
        `OSError`."""
        if time.monotonic() - self._renewed < _RENEW_S:
            return True
        if not self._touch():
            return False
        self._renewed = time.monotonic()
        return True

    def release(self) -> None:
        """Releases the lock. Does nothing if another process has taken it over. Raises `OSError`."""
        is_ours = self._touch()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if is_ours:
            unlink(self._path)

    def _create(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        self._renewed = time.monotonic()
        return True

    def _touch(self) -> bool:
        """Touches our file. Returns False if the lock's name leads to another file by now, or to none."""
        if self._fd is None:
            return False
        try:
            os.utime(self._fd)
            named = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # ESTALE: deleted by another host
                return False
            raise
        try:
            return os.path.samestat(os.fstat(named), os.fstat(self._fd))
        finally:
            os.close(named)
