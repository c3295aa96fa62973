"""Where the processes of a router share memory."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (a folder of our own in it)
MIN_SHARED_MIB = 32  # a page that does not fit in there ends the process that writes it


def shared_folder(folder: Path = SHARED_MEMORY, min_mib: float = MIN_SHARED_MIB) -> Path | None:
    """`folder`, of shared memory, if it can be written and has room, since some systems delete old files in the
    temporary folder. None stands for the temporary folder."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    room = os.statvfs(folder)
    return folder if room.f_bavail * room.f_frsize >= min_mib * 2**20 else None
