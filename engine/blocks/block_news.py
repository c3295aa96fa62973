"""What became of names since somebody last asked: which blocks this worker has now, and which it has lost. Pure.

A worker has a block if its device or its host memory holds it. Routers hear of changes, so that they know what a worker
need not compute.
"""

from __future__ import annotations


class BlockNews:
    """The last word on each name that changed. Never more of them than one interval's blocks."""

    def __init__(self) -> None:
        self._is_here: dict[bytes, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._is_here)

    def here(self, name: bytes) -> None:
        self._is_here[name] = True

    def gone(self, name: bytes) -> None:
        """It is neither on the device nor in host memory."""
        self._is_here[name] = False

    def take(self) -> tuple[bytes, bytes]:
        """(names that are here, names that are gone), each 16 bytes a name, since the last call. A name that was here
        before may be named again, and one that nobody heard of may be said to be gone."""
        changed, self._is_here = self._is_here, {}
        here = b"".join(name for name, is_here in changed.items() if is_here)
        return here, b"".join(name for name, is_here in changed.items() if not is_here)
