"""Ownership: whether a KV block is free, and for whom. Pure bookkeeping: no tensor, no clock.

A block is in exactly one of three states:

    empty    nobody refers to it, and it holds nothing worth keeping
    cached   nobody refers to it, but it holds a full block that can be found by its name; evicted when room is needed
    owned    ref_cnt > 0: by requests that share it, by transfers that read or write it, and by a step under way that
             writes it, if nobody else does

    take:  empty or cached (evicting) -> owned      share: cached -> owned
    drop:  owned -> cached (has a name) or empty    clear, forget: cached -> empty

Eviction takes the cached block that requests gave up the longest ago, a retained one (`Retention`) only if no other
is left. A transfer that held a block meanwhile changes nothing about that.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from engine.blocks.eviction_order import EvictionOrder
from engine.blocks.tiers import Tiers


@dataclass(slots=True)
class KVBlock:
    block_id: int
    ref_cnt: int = 0
    freed_at: int = 0  # when a request last gave it up, on the pool's own count


class BlockPool:
    """All blocks of one KV cache. `tiers` knows which blocks have a name, and is told of each that is evicted."""

    def __init__(self, num_blocks: int, tiers: Tiers) -> None:
        self._blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self._empty = deque(range(num_blocks))
        self._cached = EvictionOrder()
        self._num_frees = 0
        self._held: dict[int, int] = {}  # references of transfers and steps, by block
        self._writes: list[Collection[int]] = []  # blocks that each step under way writes
        self._kept: dict[int, None] = {}  # of these, those that steps alone own
        self._tiers = tiers

    # ------------------------------------------------------------------------------------------- counts

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_empty_blocks(self) -> int:
        return len(self._empty)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that somebody could take: empty ones and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_retained_cached_blocks(self) -> int:
        """Cached ones that are evicted last."""
        return self._cached.num_retained

    @property
    def num_frees(self) -> int:
        """Grows each time that a block is given up."""
        return self._num_frees

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def is_spare(self, block_id: int) -> bool:
        """Whether it is cached and not retained."""
        return self._cached.is_spare(block_id)

    # ------------------------------------------------------------------------------------ take, share, drop

    def take(self) -> int:
        """An empty block, or the next cached one, evicted; owned from here on. One must be available."""
        if self._empty:
            block_id = self._empty.popleft()
        else:
            block_id = self._cached.take_next()
            self._tiers.evicted(block_id)
        self._blocks[block_id].ref_cnt = 1
        return block_id

    def share(self, block_id: int, count: int = 1) -> None:
        """Adds `count` references to a block that is owned or cached."""
        block = self._blocks[block_id]
        if block.ref_cnt == 0:
            if block_id not in self._cached:
                raise ValueError(f"block {block_id} is empty and cannot be shared")
            self._cached.remove(block_id)
        block.ref_cnt += count

    def drop(self, block_id: int, count: int = 1) -> None:
        """Takes `count` references away. The time at which a request last gave the block up does not change."""
        block = self._blocks[block_id]
        if block.ref_cnt < count:
            raise ValueError(f"block {block_id} is freed twice")
        block.ref_cnt -= count
        if block.ref_cnt == 0:
            if any(block_id in written for written in self._writes):
                block.ref_cnt = self._held[block_id] = 1
                self._kept[block_id] = None
            elif self._tiers.cache.has_name(block_id):
                self._make_evictable(block)
            else:
                self._empty.append(block_id)

    def give_back(self, block_id: int) -> None:
        """Takes the reference of a request away, and notes that the block was given up now."""
        self.set_freed_at(block_id, self.count_frees())
        self.drop(block_id)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds a transfer's references: the blocks stay owned until `unhold`, even if their request ends."""
        for block_id in block_ids:
            self.share(block_id)
            self._held[block_id] = self._held.get(block_id, 0) + 1

    def take_held(self, num_blocks: int) -> list[int]:
        """Blocks without content, held until `unhold`. There must be room."""
        block_ids = [self.take() for _ in range(num_blocks)]
        self._held.update(dict.fromkeys(block_ids, 1))
        return block_ids

    def unhold(self, block_id: int) -> None:
        num_held = self._held.pop(block_id, 0)
        if not num_held:
            raise ValueError(f"block {block_id} is not held")
        if num_held > 1:
            self._held[block_id] = num_held - 1
        self.drop(block_id)

    def begin_writes(self, block_ids: Collection[int]) -> None:
        """A step begins that writes these blocks: they stay owned until `end_writes`, even if their request ends."""
        self._writes.append(block_ids)

    def end_writes(self, block_ids: Collection[int]) -> None:
        """The step has ended, or has not begun after all."""
        self._writes.remove(block_ids)
        if self._kept:
            self._end_kept(block_ids)

    def _end_kept(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id in self._kept and not any(block_id in written for written in self._writes):
                del self._kept[block_id]
                self.unhold(block_id)

    # --------------------------------------------------------------------------------- the order of eviction

    def count_frees(self, num: int = 1) -> int:
        """Counts so many further blocks as given up, and returns the count."""
        self._num_frees += num
        return self._num_frees

    def set_freed_at(self, block_id: int, freed_at: int) -> None:
        """Says when a request last gave the block up, as a count of `count_frees`."""
        self._blocks[block_id].freed_at = freed_at
        self.reorder(block_id)

    def reorder(self, block_id: int) -> None:
        """Whether the block is retained, or when it was given up, has changed."""
        if block_id in self._cached:
            self._make_evictable(self._blocks[block_id])

    def forget(self, block_id: int) -> None:
        """The block has lost its name."""
        if block_id in self._cached:
            self._cached.remove(block_id)
            self._empty.append(block_id)

    def clear(self) -> None:
        """All blocks have lost their names."""
        self._empty.extend(self._cached)
        self._cached.clear()

    def _make_evictable(self, block: KVBlock) -> None:
        is_retained = self._tiers.cache.name_of(block.block_id) in self._tiers.retention
        self._cached.put(block.block_id, is_retained=is_retained, freed_at=block.freed_at)

    # ------------------------------------------------------------------------------------------ integrity

    def check_integrity(self, references: Mapping[int, int]) -> list[str]:
        """What is wrong, given how many requests refer to each block; empty if every block is accounted for."""
        problems: list[str] = []
        cache, retention = self._tiers.cache, self._tiers.retention
        expected = Counter(self._held)
        expected.update(references)
        empty = Counter(self._empty)
        for block in self._blocks:
            name, places = f"block {block.block_id}", (empty[block.block_id], block.block_id in self._cached)
            if block.ref_cnt != expected[block.block_id]:
                problems.append(f"{name} has ref_cnt {block.ref_cnt}, but {expected[block.block_id]} owners")
            if sum(places) + (block.ref_cnt > 0) != 1:
                problems.append(f"{name} is in {sum(places)} free lists with ref_cnt {block.ref_cnt}")
            if places[1] and not cache.has_name(block.block_id):
                problems.append(f"{name} is cached without a name")
        for block_id in self._cached:
            if self._cached.key(block_id) != (cache.name_of(block_id) in retention, self._blocks[block_id].freed_at):
                problems.append(f"block {block_id} is out of the order of eviction")
        if self._cached.num_retained != sum(self._cached.key(block_id)[0] for block_id in self._cached):
            problems.append(f"{self._cached.num_retained} retained blocks were counted, and there are others")
        return problems
