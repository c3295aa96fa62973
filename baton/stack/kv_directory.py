"""The directory of a local stack's shared KV blocks."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import StartupError

log = logging.getLogger(__name__)

_KV_PREFIX = "baton-kv-"
_MEMORY = Path("/dev/shm")  # noqa: S108 - the directory below it is made by mkdtemp
_MIN_FREE = 1 << 30  # bytes; containers often have 64 MiB
_ABANDONED_AFTER_S = 60.0


@contextlib.contextmanager
def kv_directory(
    given: str | None,
    *,
    memory: Path = _MEMORY,
    min_free: int = _MIN_FREE,
    abandoned_after_s: float = _ABANDONED_AFTER_S,
) -> Iterator[Path]:
    """The directory of shared KV blocks: `given`, created and kept, or a private one in `memory` (see `private_parent`)
    that goes at the end.

    A private directory is locked while in use, so that one whose owner was killed is found and removed by the next.
    """
    if given is not None:
        path = Path(given).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"--kv-dir {given}: {error.strerror}") from error
        yield path
        return
    parent = private_parent(memory, min_free)
    _remove_abandoned(parent, abandoned_after_s)
    path = Path(tempfile.mkdtemp(prefix=_KV_PREFIX, dir=parent))
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def private_parent(memory: Path = _MEMORY, min_free: int = _MIN_FREE) -> Path:
    """Where a private directory is made: in `memory`, or with the temporary files if fewer than `min_free` bytes of it
    are free."""
    has_room = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= min_free
    return memory if has_room else Path(tempfile.gettempdir())


def _remove_abandoned(parent: Path, after_s: float) -> None:
    for path in parent.glob(f"{_KV_PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < after_s:
                continue  # somebody else's, or made this moment and not locked yet
            lock = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # its owner removed it just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed the KV directory of a stack that was killed", extra={"path": str(path)})
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(lock)
