"""Which of this worker's named blocks the store lacks, and which of them is written next. Pure.

    computed -> offered: queued -> in flight -> stored
                         |         '-> failed: forgotten here, offered again by the next request that uses it
                         '-> evicted before its turn: dropped

A queued block is not held: it can be evicted, so the queue costs no room and is never longer than the cache. What is
queued longest is written first, in runs of neighbouring blocks, since stores keep neighbours together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class UnstoredBlocks:
    def __init__(self) -> None:
        self._queued: OrderedDict[bytes, int] = OrderedDict()  # name: index in its request's block table
        self._in_flight: set[bytes] = set()
        self._stored: set[bytes] = set()  # of the blocks that are here
        self.num_dropped = 0  # evicted before their turn, or failed

    def __len__(self) -> int:
        """Blocks that are queued or in flight."""
        return len(self._queued) + len(self._in_flight)

    def offer(self, name: bytes, index: int) -> None:
        if name not in self._stored and name not in self._in_flight:
            self._queued.setdefault(name, index)

    def next_run(self, group_blocks: int) -> list[tuple[bytes, int]]:
        """Names and indexes of the next run; in flight from here on. It ends before a multiple of `group_blocks`."""
        run: list[tuple[bytes, int]] = []
        while self._queued:
            name, index = next(iter(self._queued.items()))
            if run and (index != run[-1][1] + 1 or index % group_blocks == 0):
                break
            del self._queued[name]
            run.append((name, index))
        self._in_flight.update(name for name, _ in run)
        return run

    def mark_stored(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._queued.pop(name, None)
            self._stored.add(name)

    def end(self, name: bytes, *, is_stored: bool) -> None:
        """The write of a block has ended."""
        self._in_flight.discard(name)
        self.num_dropped += not is_stored

    def forget(self, name: bytes) -> None:
        """The block is gone from here."""
        self._stored.discard(name)
        if self._queued.pop(name, None) is not None:
            self.num_dropped += 1

    def clear(self) -> None:
        self.num_dropped += len(self._queued)
        self._queued.clear()
        self._stored.clear()

    def names(self) -> set[bytes]:
        """Blocks that have to be here for what is said about them; those in flight are held by their transfer."""
        return self._queued.keys() | self._stored
