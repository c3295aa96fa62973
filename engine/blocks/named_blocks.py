"""Operations on blocks by their names, for no request: callers' hints, prefetches, write-back. Pure.

A lookup goes on from the device to host memory, block by block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from engine.blocks.block_pool import BlockPool
from engine.blocks.tiers import Tiers


class NamedBlocks:
    def __init__(self, pool: BlockPool, tiers: Tiers) -> None:
        self._pool = pool
        self._tiers = tiers
        self._cache = tiers.cache

    # ------------------------------------------------------------------------------------------------- counts

    def count_here(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Counts the leading names that are cached here: (how many the device has, how many only host memory has)."""
        here = self._here(names)
        num_device = sum(name in self._cache for name in here)
        return num_device, len(here) - num_device

    def count_on_device(self, names: Sequence[bytes], start: int = 0, stop: int | None = None) -> int:
        """How many leading names of `names[start:stop]` the device has."""
        found = map(names.__getitem__, range(start, len(names) if stop is None else stop))
        return sum(1 for _ in takewhile(self._cache.__contains__, found))

    def count_in_host(self, names: Sequence[bytes]) -> int:
        """How many leading names only host memory has."""
        return sum(1 for _ in takewhile(lambda name: name in self._tiers.host and name not in self._cache, names))

    def num_spare_blocks(self, besides: Sequence[bytes]) -> int:
        """Available ones that are neither retained nor `besides`, which the device has."""
        num_besides = sum(self._pool.is_spare(self._cache[name]) for name in besides)
        return self._pool.num_available_blocks - self._pool.num_retained_cached_blocks - num_besides

    # ---------------------------------------------------------------------------------- bring, touch, forget

    def promote(self, names: Sequence[bytes]) -> None:
        """Copies blocks up from host memory, into blocks that the caller owns from here on. There must be room."""
        self._tiers.host.promote(names, self._pool.take, self._tiers.put)

    def bring_up(self, names: Sequence[bytes]) -> None:
        """Copies blocks up that only host memory has, as if a request had just used them. There must be room."""
        self.promote(names)
        for name in reversed(names):
            self._pool.give_back(self._cache[name])

    def load_for_write_back(self, group_tokens: int) -> None:
        """Copies up a run of blocks that only host memory has and the store lacks, in place of the blocks that would be
        evicted next. The copies are then queued to be written. Only while no step is under way, since it takes
        blocks."""
        names = self._tiers.write_back.next_below(group_tokens, self._pool.num_available_blocks)
        self.promote(names)
        for name in names:
            block_id = self._cache[name]
            self._pool.set_freed_at(block_id, 0)  # no request asked for it
            self._pool.drop(block_id)

    def keep_prefetched(self, block_id: int, name: bytes) -> None:
        """Names a held block whose content has come from the store, and caches it as if a request had just used it."""
        self._tiers.put(block_id, name)
        self._tiers.write_back.mark_stored([name])
        self._pool.set_freed_at(block_id, self._pool.count_frees())
        self._pool.unhold(block_id)

    def touch(self, names: Sequence[bytes]) -> None:
        """Moves these blocks, which the device has, to the end of the order of eviction, as if a request had just used
        them."""
        for name in reversed(names):
            block_id = self._cache[name]
            self._pool.share(block_id)
            self._pool.give_back(block_id)

    def evict(self, names: Iterable[bytes]) -> tuple[int, int]:
        """Forgets these names; blocks in use stay in use, unfindable. Returns how many the device had, and how many
        only host memory."""
        num_device = num_host = 0
        for name in names:
            block_id, was_in_host = self._cache.find(name), self._tiers.host.forget(name)
            if block_id is not None:
                self._cache.remove(block_id)
                self._pool.forget(block_id)
            elif not was_in_host:
                continue
            num_device += block_id is not None
            num_host += block_id is None
            self._tiers.forget(name)
        return num_device, num_host

    # ---------------------------------------------------------------------------------------------- retention

    def retain(self, tenant: str, names: Sequence[bytes], seconds: float) -> None:
        """Retains the blocks of these names, a prompt's from the first one on: they are evicted after all others for
        `seconds`. Names after the first one that is not cached here are not retained."""
        here = self._here(names)
        changed, num_lost = self._tiers.retention.retain(tenant, here, seconds)
        self._tiers.counts.retained += len(here)
        self._tiers.counts.outbid += num_lost
        self.reorder(changed)

    def end_retention(self, tenant: str, names: Sequence[bytes]) -> None:
        """Ends the tenant's retention of these names."""
        self.reorder(self._tiers.retention.release(tenant, names))

    def reorder(self, names: Iterable[bytes]) -> None:
        """Updates the order of eviction after these names' retention has changed."""
        for name in names:
            if (block_id := self._cache.find(name)) is not None:
                self._pool.reorder(block_id)
            self._tiers.host.pool.reorder(name)

    def _here(self, names: Iterable[bytes]) -> list[bytes]:
        """The leading names that are cached here."""
        return list(takewhile(self._tiers.__contains__, names))
