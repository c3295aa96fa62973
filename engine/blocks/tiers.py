"""Which tier holds the content of a name: the device, host memory, both, or neither. Pure.

It tells other classes of each change: `WriteBack` knows what the store still lacks, `BlockNews` what routers have not
heard yet, `Retention` which names are evicted last.
"""

from __future__ import annotations

from collections.abc import Set

from engine.blocks.block_news import BlockNews
from engine.blocks.counts import CacheCounts
from engine.blocks.host_tier import HostTier
from engine.blocks.prefix_cache import PrefixCache
from engine.blocks.retention import Retention
from engine.blocks.write_back import NoWriteBack, WriteBack


class Tiers:
    def __init__(
        self,
        block_size: int,
        root_hash: bytes,
        retention: Retention,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int,
        keep_evicted: bool,
        has_store: bool,
    ) -> None:
        self.counts = CacheCounts()
        self.cache = PrefixCache(block_size, root_hash, is_enabled=enable_prefix_caching)
        self.news = BlockNews()
        self.retention = retention
        self.host = HostTier(
            num_host_blocks, self.counts, self._left_host, retention.__contains__, keep_evicted=keep_evicted
        )
        self.write_back = (
            WriteBack(block_size, self.cache, self.host, self.counts)
            if has_store and enable_prefix_caching
            else NoWriteBack()
        )

    def __contains__(self, name: bytes) -> bool:
        return name in self.cache or name in self.host

    def names(self) -> Set[bytes]:
        """The names of all blocks that can be found, on the device or in host memory."""
        return self.cache.names() | self.host.names()

    # ------------------------------------------------------------------------------------- what became of it

    def put(self, block_id: int, name: bytes) -> None:
        """Names a block of the device. Of equal blocks the first one keeps the name."""
        if self.cache.put(block_id, name):
            self.news.here(name)
            self.write_back.promoted(name)

    def evicted(self, block_id: int) -> None:
        """Takes the name of a block that will get another content, and copies the block to host memory if that has
        room."""
        name = self.cache.remove(block_id)
        if name is None:
            return
        if self.host.demote(block_id, name):
            self.write_back.demoted(name)
        else:
            self._lost(name)

    def forget(self, name: bytes) -> None:
        """Forgets a name that a caller has evicted from both tiers, and ends its retention."""
        self.retention.forget(name)
        self.news.gone(name)
        self.write_back.gone(name)

    def clear(self) -> None:
        """Forgets every name."""
        for name in self.names():
            self.news.gone(name)
        self.cache.clear()
        self.host.pool.clear()
        self.write_back.clear()
        self.retention.clear()

    def _left_host(self, name: bytes) -> None:
        if name not in self.cache:
            self._lost(name)

    def _lost(self, name: bytes) -> None:
        """Forgets a name whose block is in no tier any more."""
        self.news.gone(name)
        self.write_back.gone(name)
        self.counts.yielded += self.retention.forget(name)

    # -------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> list[str]:
        """What is wrong with names; empty if each finds what it stands for."""
        problems = self.cache.check_integrity() + self.write_back.check_integrity()
        return problems + self.retention.check_integrity(self.names())
