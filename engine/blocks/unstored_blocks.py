"""Which of this worker's named blocks the store lacks, and which of them is written next. Pure.

    computed -> offered: queued -> in flight -> stored -> after a while: unverified -> used again: offered
                         |         '-> failed: forgotten here, offered again by the next request that uses it
                         |-> evicted to host memory before its turn: below -> copied up again: queued
                         '-> evicted before its turn: dropped

A queued block is not held and can be evicted, so the queue costs no room and is never longer than the cache. The block
that was queued first is written first, in a run with its neighbours, since stores keep neighbours together. Connectors
read the device's cache only, so blocks in host memory are copied up before they are written.

A store evicts what nobody seems to use, and it does not see that a worker finds a block in its own cache. So the engine
trusts a store to hold a block for a while only. If the store still has it, writing it again moves no bytes, and tells
the store that the block is in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.blocks.counts import CacheCounts


class UnstoredBlocks:
    def __init__(self, counts: CacheCounts) -> None:
        self._counts = counts
        self._queued: OrderedDict[bytes, int] = OrderedDict()  # name: index in its request's block table
        self._below: OrderedDict[bytes, int] = OrderedDict()  # the same, of which only host memory has a copy
        self._in_flight: set[bytes] = set()
        self._stored: set[bytes] = set()  # of the blocks that are here
        self._unverified: set[bytes] = set()  # the same, but that is long ago; may be queued

    def __len__(self) -> int:
        """Blocks that still have to be written, or verified."""
        return len(self._queued) + len(self._below) + len(self._in_flight)

    def offer(self, name: bytes, index: int) -> None:
        """The block is on the device."""
        if name not in self._stored and name not in self._in_flight:
            self._queued.setdefault(name, index)

    def next_run(self, group_blocks: int) -> list[tuple[bytes, int]]:
        """Names and indexes of the next run; in flight from here on. It ends before a multiple of `group_blocks`."""
        run = _run(self._queued, group_blocks)
        for name, _ in run:
            del self._queued[name]
            self._in_flight.add(name)
        return run

    def mark_stored(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._queued.pop(name, None)
            self._below.pop(name, None)
            self._unverified.discard(name)
            self._stored.add(name)

    def age(self) -> None:
        """Has every block that was stored so far verified when it is used again."""
        self._unverified |= self._stored
        self._stored.clear()

    def recheck(self, names: Iterable[bytes]) -> None:
        """The store seems to lack these blocks: the next request that uses one offers it again."""
        for name in names:
            self._stored.discard(name)
            self._unverified.discard(name)

    def demote(self, name: bytes) -> None:
        """The block is in host memory only."""
        index = self._queued.pop(name, None)
        if index is not None and name not in self._unverified:  # nothing is brought up to be verified
            self._below[name] = index

    def promote(self, name: bytes) -> None:
        """The block is on the device again."""
        if (index := self._below.pop(name, None)) is not None:
            self._queued[name] = index

    def next_below(self, group_blocks: int, limit: int) -> list[bytes]:
        """A run of at most `limit` blocks that only host memory has, to be promoted. None while others are queued."""
        if self._queued:
            return []
        run = _run(self._below, group_blocks, step=-1)[:limit]  # the device evicts a prompt's last block first
        return [name for name, _ in reversed(run)]

    def end(self, name: bytes, *, is_stored: bool) -> None:
        """The write of a block has ended."""
        self._in_flight.discard(name)
        self._counts.dropped += not is_stored

    def forget(self, name: bytes) -> None:
        """The block is gone from here."""
        is_due = self._queued.pop(name, None) is not None or self._below.pop(name, None) is not None
        self._counts.dropped += is_due and name not in self._unverified
        self._stored.discard(name)
        self._unverified.discard(name)

    def clear(self) -> None:
        for name in [*self._queued, *self._below]:
            self.forget(name)
        self._stored.clear()
        self._unverified.clear()

    def names(self) -> set[bytes]:
        """Names whose blocks must be in the cache; blocks in flight are held by their transfer."""
        return self._queued.keys() | self._below.keys() | self._stored | self._unverified

    def queued_names(self) -> set[bytes]:
        """Names whose blocks must be on the device."""
        return set(self._queued)


def _run(blocks: OrderedDict[bytes, int], group_blocks: int, step: int = 1) -> list[tuple[bytes, int]]:
    """The first of `blocks`, and those behind it whose indexes go on from it in the same group."""
    run: list[tuple[bytes, int]] = []
    for name, index in blocks.items():
        if run and (index != run[-1][1] + step or index // group_blocks != run[0][1] // group_blocks):
            break
        run.append((name, index))
    return run
