"""Where the processes of a router share memory."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (a folder of our own in it)
MIN_SHARED_MIB = 32  # a page that does not fit in there ends the process that writes it


def shared_folder() -> Path | None:
    """The folder of shared memory if it can be written and has room, since some systems delete old files in the
    temporary folder. None stands for the temporary folder."""
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return None
    room = os.statvfs(SHARED_MEMORY)
    return SHARED_MEMORY if room.f_bavail * room.f_frsize >= MIN_SHARED_MIB * 2**20 else None
