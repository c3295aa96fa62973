"""Which blocks this worker has gained or lost since the last question. Pure.

A worker has a block if its device or its host memory holds it. Routers hear of changes, so that they know what a worker
need not compute.
"""

from __future__ import annotations


class BlockNews:
    """The current state of each name that changed since the last `take`, so at most the blocks of one interval."""

    def __init__(self) -> None:
        self._is_here: dict[bytes, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._is_here)

    def here(self, name: bytes) -> None:
        self._is_here[name] = True

    def gone(self, name: bytes) -> None:
        """The block is neither on the device nor in host memory any more."""
        self._is_here[name] = False

    def take(self) -> tuple[bytes, bytes]:
        """(names that are here, names that are gone), each 16 bytes a name, since the last call. The first may hold
        names that were told before, and the second names that were never told."""
        changed, self._is_here = self._is_here, {}
        here = b"".join(name for name, is_here in changed.items() if is_here)
        return here, b"".join(name for name, is_here in changed.items() if not is_here)
