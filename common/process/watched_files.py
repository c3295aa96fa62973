"""Values made from files (certificates, keys), and made anew when the files change, so that a rotation needs no
restart.

Kubernetes changes a mounted Secret by moving a link; other tools write in place. Either way the files' status changes,
and asking for it costs microseconds. So nothing watches the files: each use of the value looks at their status first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from common import metrics
from common.errors import StartupError

log = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")
_Signature = tuple[tuple[int, int, int, int], ...]


@dataclass(slots=True, frozen=True)
class FilesInUse:
    """What is known of the value in use, for people."""

    what: str
    path: str
    read_at: float  # seconds since 1970
    error: str  # why the files as they are now cannot be used; empty if they can


class WatchedFiles(Generic[ValueT]):
    """`load` reads `paths` and raises `StartupError` for what it cannot use. The first time, the error reaches the
    caller; later, the previous value is kept, and the error goes to log and metrics, under the name `what`. Threads
    may share it."""

    def __init__(self, what: str, paths: Sequence[str], load: Callable[[], ValueT]) -> None:
        self._what = what
        for outcome in ("ok", "failed"):
            metrics.file_reloads.labels(what, outcome)  # a rate sees no increase in a series' first sample
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._signature = self._look()
        self._value = load()
        self._version = 0
        self._read_at = time.time()
        self._error = ""

    def current(self) -> ValueT:
        """Never raises: files that are gone or wrong leave the last good value."""
        return self.versioned()[0]

    def versioned(self) -> tuple[ValueT, int]:
        """The value, and a number that differs for each new value."""
        with self._lock:
            signature = self._look()
            if signature != self._signature:
                self._reload()
                # Taken before the files were read: a change meanwhile is seen the next time.
                self._signature = signature
            return self._value, self._version

    def in_use(self) -> FilesInUse:
        """Looks at the files first."""
        self.current()
        with self._lock:
            gone = "" if self._signature is not None else "it is not there, or cannot be read"
            return FilesInUse(self._what, ", ".join(self._paths), self._read_at, self._error or gone)

    def _reload(self) -> None:
        try:
            self._value = self._load()
        except StartupError as error:
            self._error = error.message
            metrics.file_reloads.labels(self._what, "failed").inc()
            log.warning("changed files cannot be used: the old ones stay", extra={"reason": error.message})
            return
        self._version += 1
        self._read_at, self._error = time.time(), ""
        metrics.file_reloads.labels(self._what, "ok").inc()
        log.info("files were read again", extra={"what": self._what, "files": ", ".join(self._paths)})

    def _look(self) -> _Signature | None:
        """None if one of the files is not there."""
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError:
            return None
        return tuple((one.st_dev, one.st_ino, one.st_mtime_ns, one.st_size) for one in found)


def read_file(field: str, path: str) -> bytes:
    """Raises `StartupError` that names the setting."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise StartupError(f"{field}: cannot read {path}: {error.strerror}") from error
