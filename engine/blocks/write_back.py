"""Write-back: what this worker computed goes to the store. Pure: it says what to write, `Transfers` writes it.

Computed blocks wait for their turn by name, and are not held (`UnstoredBlocks`). A block that is evicted from both
tiers before its turn is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.blocks.counts import CacheCounts
from engine.blocks.host_tier import HostTier
from engine.blocks.prefix_cache import PrefixCache
from engine.blocks.unstored_blocks import UnstoredBlocks
from engine.request import Request
from kv_store.base import LocalBlock


class NoWriteBack:
    """There is no store: nothing is written back. The methods say what `WriteBack` does if there is one."""

    def __len__(self) -> int:
        """Blocks that still have to be written, or verified."""
        return 0

    # What the block manager tells it: where a named block is now.

    def promoted(self, name: bytes) -> None:
        """The block is on the device."""

    def demoted(self, name: bytes) -> None:
        """The block is in host memory only."""

    def gone(self, name: bytes) -> None:
        """The block is neither on the device nor in host memory."""

    def clear(self) -> None:
        """No block has a name any more."""

    # What the engine tells and asks.

    def offer(self, request: Request) -> None:
        """Queues the request's computed full blocks, unless the store is known to hold them."""

    def next_run(self, group_tokens: int) -> Sequence[LocalBlock]:  # noqa: ARG002
        """The next run of neighbouring blocks to be written, up to an index of a multiple of `group_tokens`."""
        return ()

    def next_below(self, group_tokens: int, limit: int) -> Sequence[bytes]:  # noqa: ARG002
        """A run of at most `limit` blocks that only host memory has, to be copied up. None while others are queued."""
        return ()

    def end(self, name: bytes, *, is_stored: bool, is_new: bool) -> None:
        """The write of a block that `next_run` gave has ended. `is_new`: the store did not have it before."""

    def mark_stored(self, names: Iterable[bytes]) -> None:
        """The store holds these now, or another worker is about to bring them there."""

    def age(self) -> None:
        """Blocks that the store is known to hold are verified when they are used next."""

    def recheck(self, names: Iterable[bytes]) -> None:
        """The store seems to lack these blocks by now: they are written again when they are used next."""

    def check_integrity(self) -> list[str]:
        """What is wrong; empty if every block that waits to be written is here."""
        return []


class WriteBack(NoWriteBack):
    def __init__(self, block_size: int, cache: PrefixCache, host: HostTier, counts: CacheCounts) -> None:
        self._block_size = block_size
        self._cache = cache
        self._host = host
        self._counts = counts
        self._unstored = UnstoredBlocks(counts)

    def __len__(self) -> int:
        return len(self._unstored)

    def promoted(self, name: bytes) -> None:
        self._unstored.promote(name)

    def demoted(self, name: bytes) -> None:
        self._unstored.demote(name)

    def gone(self, name: bytes) -> None:
        self._unstored.forget(name)

    def clear(self) -> None:
        self._unstored.clear()

    def offer(self, request: Request) -> None:
        self._cache.name_full_blocks(request)
        for index, name in enumerate(request.block_hashes[: request.num_computed_tokens // self._block_size]):
            if name in self._cache:
                self._unstored.offer(name, index)

    def next_run(self, group_tokens: int) -> Sequence[LocalBlock]:
        run = self._unstored.next_run(self._group_blocks(group_tokens))
        return [LocalBlock(index, self._cache[name], name) for name, index in run]

    def next_below(self, group_tokens: int, limit: int) -> Sequence[bytes]:
        return self._unstored.next_below(self._group_blocks(group_tokens), limit)

    def end(self, name: bytes, *, is_stored: bool, is_new: bool) -> None:
        self._counts.stored += is_stored and is_new
        self._unstored.end(name, is_stored=is_stored)
        if is_stored:
            self.mark_stored([name])

    def mark_stored(self, names: Iterable[bytes]) -> None:
        self._unstored.mark_stored(name for name in names if name in self._cache or name in self._host)

    def age(self) -> None:
        self._unstored.age()

    def recheck(self, names: Iterable[bytes]) -> None:
        self._unstored.recheck(names)

    def check_integrity(self) -> list[str]:
        names, queued = self._unstored.names(), self._unstored.queued_names()
        lost = (names - self._cache.names() - self._host.names()) | (queued - self._cache.names())
        return [f"{name.hex()} is said to be here for the store, but is not" for name in lost]

    def _group_blocks(self, group_tokens: int) -> int:
        return max(group_tokens // self._block_size, 1)
