"""Ownership: who has which KV block. Pure bookkeeping: no tensor, no clock.

A block is in exactly one of three states:

    empty    nobody refers to it, and it holds nothing worth keeping
    cached   nobody refers to it, but it holds a full block that can be found by its name; evicted when room is needed
    owned    ref_cnt > 0: by requests that share it, and by transfers that read or write it

    allocate/append: empty or cached (evicting) -> owned      match: cached -> owned
    free:            owned -> cached (has a name) or empty    reset: cached -> empty

Eviction takes the cached block that requests gave up the longest ago, a retained one (`Retention`) only if no other
is left. `free` returns a request's blocks last one first, so that of equally old blocks the one furthest from the root
goes first, also of a request that gave up the first ones while it ran; a transfer that held a block meanwhile changes
nothing about that.

Rooms beside it know the rest: `PrefixCache` the names of blocks, `HostTier` what host memory holds, `WriteBack` what
the store still lacks, `BlockNews` what routers have not heard yet, `Retention` which names are evicted last,
`EvictionOrder` which block is next. This file tells them what becomes of a block. A lookup goes on from the device to
host memory, block by block.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile

from engine.blocks.block_news import BlockNews
from engine.blocks.counts import CacheCounts
from engine.blocks.eviction_order import EvictionOrder
from engine.blocks.host_tier import HostCopy, HostTier
from engine.blocks.prefix_cache import PrefixCache
from engine.blocks.retention import Retention
from engine.blocks.write_back import NoWriteBack, WriteBack
from engine.request import Request


@dataclass(slots=True)
class KVBlock:
    block_id: int
    ref_cnt: int = 0
    freed_at: int = 0  # when a request last gave it up, on the block manager's own count


class BlockManager:
    """Allocates, shares and evicts the blocks of one KV cache."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        root_hash: bytes,
        *,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        keep_evicted: bool = False,
        has_store: bool = False,
        retain_share: float = 1.0,
        retain_tenant_share: float = 1.0,
    ) -> None:
        """`num_host_blocks` are for swapped requests and, with `keep_evicted`, for what the device evicts. The shares
        are of `num_blocks`, and say how many names may be retained, for all tenants and for each."""
        self.block_size = block_size
        self._blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self._empty = deque(range(num_blocks))
        self._cached = EvictionOrder()
        self._num_frees = 0
        self._held: Counter[int] = Counter()  # references of transfers
        self.counts = CacheCounts()
        self._num_dropped_before = 0  # in the counts that were taken
        self.cache = PrefixCache(block_size, root_hash, is_enabled=enable_prefix_caching)
        self.news = BlockNews()
        self.retention = Retention(int(num_blocks * retain_share), int(num_blocks * retain_tenant_share))
        self.host = HostTier(
            num_host_blocks, self.counts, self._left_host, self.retention.__contains__, keep_evicted=keep_evicted
        )
        self.write_back = (
            WriteBack(block_size, self.cache, self.host, self.counts)
            if has_store and enable_prefix_caching
            else NoWriteBack()
        )

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
        """Blocks that an allocation could get: empty ones and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_retained_cached_blocks(self) -> int:
        """Cached ones that are evicted last."""
        return self._cached.num_retained

    @property
    def num_frees(self) -> int:
        """Grows each time that a block is given up."""
        return self._num_frees

    def num_spare_blocks(self, besides: Sequence[bytes]) -> int:
        """Available ones that are neither retained nor `besides`, which the device has."""
        num_besides = sum(self._cached.is_spare(self.cache[name]) for name in besides)
        return self.num_available_blocks - self._cached.num_retained - num_besides

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def may_demote(self, num_tokens: int) -> bool:
        """Whether an allocation for so many tokens could copy evicted blocks to host memory."""
        return self.host.keeps_evicted and self.blocks_for(num_tokens) > self.num_empty_blocks

    def take_counts(self) -> CacheCounts:
        """What was counted since the last call."""
        num_dropped = self.write_back.num_dropped
        self.counts.dropped = num_dropped - self._num_dropped_before
        self._num_dropped_before = num_dropped
        return self.counts.take()

    # ------------------------------------------------------------------------------- find by name and share

    def names(self) -> Set[bytes]:
        """Of all blocks that can be found, on the device or in host memory."""
        return self.cache.names() | self.host.names()

    def find_prefix(self, request: Request) -> int:
        """How many of the request's leading full blocks are here, on the device or in host memory."""
        names = self.cache.findable(request)
        for num_found, name in enumerate(names):
            if not self._is_here(name):
                return num_found
        return len(names)

    def name_computed(self, request: Request) -> None:
        """Makes the full blocks below `request.num_computed_tokens` findable. Of equal blocks the first one stays."""
        if not self.cache.is_enabled:
            return
        self.cache.name_full_blocks(request)
        num_full = request.num_computed_tokens // self.block_size
        for index in range(request.num_named_blocks, num_full):
            self._name(request.block_ids[index], request.block_hashes[index])
        request.num_named_blocks = num_full

    def name_arrived(self, request: Request, index: int) -> None:
        """Makes a full block that was fetched findable, whatever is missing before it."""
        name = request.block_hashes[index]
        self._name(request.block_ids[index], name)
        self.write_back.mark_stored([name])  # the worker that computed it writes it to the store

    def adopt(self, request: Request, index: int) -> bool:
        """Gives the request the block of that name in place `index` and takes its own away. False if none is here."""
        found = self.cache.find(request.block_hashes[index])
        if found is None:
            return False
        if found != request.block_ids[index]:
            self.take_over(request, index, found)
        return True

    def adopt_computed(self, request: Request) -> None:
        """Skips blocks that are here by now, computed by another request, or fetched out of order. Names them all."""
        size = self.block_size
        self.cache.name_full_blocks(request)
        if request.num_computed_tokens % size:
            return
        index, stop = request.num_computed_tokens // size, (request.num_tokens - 1) // size
        while index < stop and self.adopt(request, index):
            index += 1
        request.num_computed_tokens = index * size

    def take_over(self, request: Request, index: int, block_id: int) -> None:
        """Puts a block that others own, or that is cached, in the place of the request's own."""
        self._share(block_id)
        self._drop(request.block_ids[index])
        request.block_ids[index] = block_id

    def replace(self, request: Request, index: int) -> None:
        """Gives the request another block of its own in that place, with no content. One must be available."""
        self._drop(request.block_ids[index])
        request.block_ids[index] = self._take()

    def reset_prefix_cache(self) -> None:
        """Forgets every name; blocks in use stay in use, unfindable."""
        for name in self.names():
            self.news.gone(name)
        self.cache.clear()
        self._empty.extend(self._cached)
        self._cached.clear()
        self.host.pool.clear()
        self.write_back.clear()
        self.retention.clear()

    def bring_up(self, names: Sequence[bytes]) -> None:
        """Copies blocks up that only host memory has, as if a request had just used them. There must be room."""
        self._promote(names)
        for name in reversed(names):
            self._give_back(self.cache[name])

    def take_held(self, num_blocks: int) -> list[int]:
        """Blocks without content, held until `keep_prefetched` or `unhold`. There must be room."""
        block_ids = [self._take() for _ in range(num_blocks)]
        self._held.update(block_ids)
        return block_ids

    def keep_prefetched(self, block_id: int, name: bytes) -> None:
        """A held block has its content now, from the store: it is cached, as if a request had just used it."""
        self._name(block_id, name)
        self.write_back.mark_stored([name])
        self._num_frees += 1
        self._blocks[block_id].freed_at = self._num_frees
        self.unhold(block_id)

    def touch(self, names: Sequence[bytes]) -> None:
        """As if a request had just used these, which are on the device."""
        for name in reversed(names):
            block_id = self.cache[name]
            self._share(block_id)
            self._give_back(block_id)

    def evict(self, names: Iterable[bytes]) -> tuple[int, int]:
        """Forgets these names; blocks in use stay in use, unfindable. Returns how many the device had, and how many
        only host memory."""
        num_device = num_host = 0
        for name in names:
            block_id, was_in_host = self.cache.find(name), self.host.forget(name)
            if block_id is not None:
                self.cache.remove(block_id)
                if block_id in self._cached:
                    self._cached.remove(block_id)
                    self._empty.append(block_id)
            elif not was_in_host:
                continue
            num_device += block_id is not None
            num_host += block_id is None
            self.retention.forget(name)
            self.news.gone(name)
            self.write_back.gone(name)
        return num_device, num_host

    def load_for_write_back(self, group_tokens: int) -> None:
        """Copies up a run of blocks that only host memory has and the store lacks, in the place of what would be
        evicted next, and so queues it to be written. Only while no step is under way, since it takes blocks."""
        names = self.write_back.next_below(group_tokens, self.num_available_blocks)
        self._promote(names)
        for name in names:
            block = self._blocks[self.cache[name]]
            block.freed_at = 0  # no request asked for it
            self._drop(block.block_id)

    # ------------------------------------------------------------------------------------------- retention

    def count_here(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Of the leading names that are here, how many are on the device, and how many only in host memory."""
        here = list(takewhile(self._is_here, names))
        num_device = sum(name in self.cache for name in here)
        return num_device, len(here) - num_device

    def count_on_device(self, names: Sequence[bytes], start: int = 0, stop: int | None = None) -> int:
        """How many leading names of `names[start:stop]` the device has."""
        found = map(names.__getitem__, range(start, len(names) if stop is None else stop))
        return sum(1 for _ in takewhile(self.cache.__contains__, found))

    def count_in_host(self, names: Sequence[bytes]) -> int:
        """How many leading names only host memory has."""
        return sum(1 for _ in takewhile(lambda name: name in self.host and name not in self.cache, names))

    def retain(self, tenant: str, names: Sequence[bytes], seconds: float) -> None:
        """Blocks of these names, a prompt's from its first one on, are evicted after all others for some time. What
        comes after one that is not here is not retained."""
        here = list(takewhile(self._is_here, names))
        changed, num_lost = self.retention.retain(tenant, here, seconds)
        self.counts.retained += len(here)
        self.counts.outbid += num_lost
        self._reorder(changed)

    def end_retention(self, tenant: str, names: Sequence[bytes]) -> None:
        """The tenant wants blocks of these names retained no longer."""
        self._reorder(self.retention.release(tenant, names))

    def expire_retention(self, now: float) -> None:
        self._reorder(self.retention.expire(now))

    def _retain_prompt(self, request: Request) -> None:
        if (asked := request.retain) is not None:
            num_tokens = min(asked.num_tokens or request.num_prompt_tokens, request.num_prompt_tokens)
            self.retain(request.tenant, request.block_hashes[: num_tokens // self.block_size], asked.seconds)

    def _reorder(self, names: Iterable[bytes]) -> None:
        """Whether these are retained has changed."""
        for name in names:
            found = self.cache.find(name)
            if found is not None and found in self._cached:
                self._make_evictable(self._blocks[found])
            self.host.pool.reorder(name)

    def _is_here(self, name: bytes) -> bool:
        return name in self.cache or name in self.host

    # ------------------------------------------------------------------------------------ allocate and free

    def allocate(self, request: Request, num_tokens: int, num_found: int = 0) -> bool:
        """Gives a request without blocks its first `num_found` blocks (see `find_prefix`), shared if the device has
        them and copied up if host memory has, and new blocks up to `num_tokens`; all or nothing."""
        if request.block_ids:
            raise ValueError(f"request {request.request_id} already has blocks")
        names = request.block_hashes[:num_found]
        shared = [self.cache[name] for name in names if name in self.cache]
        num_blocks = max(self.blocks_for(num_tokens), num_found)
        num_revived = sum(self._blocks[block_id].ref_cnt == 0 for block_id in shared)
        if num_blocks - len(shared) > self.num_available_blocks - num_revived:
            return False
        for block_id in shared:
            self._share(block_id)
        self._promote([name for name in names if name not in self.cache])
        request.block_ids = [self.cache[name] for name in names]
        request.block_ids += [self._take() for _ in range(num_blocks - num_found)]
        return True

    def append(self, request: Request, num_tokens: int) -> bool:
        """Grows the block table to hold `num_tokens`; all or nothing."""
        num_new = self.blocks_for(num_tokens) - len(request.block_ids)
        if num_new > self.num_available_blocks:
            return False
        request.block_ids.extend(self._take() for _ in range(num_new))
        return True

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Gives up the last blocks, beyond those that hold `num_tokens`. They have no name."""
        while len(request.block_ids) > self.blocks_for(num_tokens):
            self._drop(request.block_ids.pop())

    def free(self, request: Request) -> None:
        """Gives up all of the request's blocks, on the device and in host memory; retains those that it asked for."""
        self._retain_prompt(request)
        self._give_up(request)
        self.host.pool.free(request.host_block_ids)
        request.host_block_ids = []

    def free_unseen(self, request: Request, first_seen: int) -> None:
        """Gives up the request's blocks whose tokens all come before token `first_seen`, which no layer will see again.

        The table keeps its length: the oldest block that is still seen stands in the places of those that are gone, so
        that it never names a block of another request. It may not be written then, so it has to be full.
        """
        stop = first_seen // self.block_size
        if stop <= request.num_unseen_blocks or stop >= request.num_computed_tokens // self.block_size:
            return
        stand_in = request.block_ids[stop]
        if not request.num_unseen_blocks:
            # Of those that it gives up while it runs, later ones are older: the end of a prefix is evicted first.
            self._num_frees += self.num_blocks
            request.unseen_since = self._num_frees
        for index in reversed(range(stop)):
            block_id = request.block_ids[index]
            if index >= request.num_unseen_blocks:
                self._blocks[block_id].freed_at = request.unseen_since - index
            self._share(stand_in)
            self._drop(block_id)
            request.block_ids[index] = stand_in
        request.num_unseen_blocks = stop

    def swap_out(self, request: Request) -> bool:
        """Moves a request to host memory. Returns False and changes nothing if that is full."""
        num_unseen = request.num_unseen_blocks
        host_blocks = self.host.swap_out(request.block_ids[num_unseen:])
        if host_blocks is None:
            return False
        request.host_block_ids = host_blocks
        self._give_up(request)
        request.num_named_blocks = request.num_unseen_blocks = num_unseen  # what is gone never gets a name again
        return True

    def swap_in(self, request: Request) -> bool:
        """Brings a swapped request back. Returns False and changes nothing if there is no room for it and its next
        token."""
        num_wanted = self.blocks_for(request.num_tokens) - request.num_unseen_blocks
        if max(len(request.host_block_ids), num_wanted) > self.num_available_blocks:
            return False
        request.block_ids = [self._take() for _ in request.host_block_ids]
        self.host.swap_in(request.host_block_ids, request.block_ids)
        request.host_block_ids = []
        for _ in range(request.num_unseen_blocks):
            self._share(request.block_ids[0])
            request.block_ids.insert(0, request.block_ids[0])
        return True

    def take_copies(self) -> list[HostCopy]:
        """See `HostTier.take_copies`."""
        return self.host.take_copies()

    # ----------------------------------------------------------------------------------------------- holds

    def hold(self, block_ids: Iterable[int]) -> None:
        """References of a transfer: the blocks stay owned until `unhold`, whatever becomes of their request."""
        for block_id in block_ids:
            self._share(block_id)
            self._held[block_id] += 1

    def unhold(self, block_id: int) -> None:
        if not self._held[block_id]:
            raise ValueError(f"block {block_id} is not held")
        self._held[block_id] -= 1
        if not self._held[block_id]:
            del self._held[block_id]
        self._drop(block_id)

    # -------------------------------------------------------------------------------------------- internals

    def _take(self) -> int:
        """An empty block, or the next cached one, evicted; owned from here on."""
        if self._empty:
            block_id = self._empty.popleft()
        else:
            block_id = self._cached.take_next()
            self._evict(block_id)
        self._blocks[block_id].ref_cnt = 1
        return block_id

    def _evict(self, block_id: int) -> None:
        name = self.cache.remove(block_id)
        if name is None:
            return
        if self.host.demote(block_id, name):
            self.write_back.demoted(name)
        else:
            self._lost(name)

    def _give_up(self, request: Request) -> None:
        for block_id in reversed(request.block_ids):
            self._give_back(block_id)
        # Without their beginning the others would not be found: what it gave up before is as old as the rest.
        for name in reversed(request.block_hashes[: request.num_unseen_blocks]):
            found = self.cache.find(name)
            if found is not None and found in self._cached:
                self._num_frees += 1
                self._blocks[found].freed_at = self._num_frees
                self._make_evictable(self._blocks[found])
        request.block_ids = []
        request.num_named_blocks = request.num_unseen_blocks = 0

    def _give_back(self, block_id: int) -> None:
        """Somebody who used the block does not need it any more."""
        self._num_frees += 1
        self._blocks[block_id].freed_at = self._num_frees
        self._drop(block_id)

    def _share(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.ref_cnt == 0:
            if block_id not in self._cached:
                raise ValueError(f"block {block_id} is empty and cannot be shared")
            self._cached.remove(block_id)
        block.ref_cnt += 1

    def _drop(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.ref_cnt == 0:
            raise ValueError(f"block {block_id} is freed twice")
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            if self.cache.has_name(block_id):
                self._make_evictable(block)
            else:
                self._empty.append(block_id)

    def _make_evictable(self, block: KVBlock) -> None:
        is_retained = self.cache.name_of(block.block_id) in self.retention
        self._cached.put(block.block_id, is_retained=is_retained, freed_at=block.freed_at)

    def _name(self, block_id: int, name: bytes) -> None:
        if self.cache.put(block_id, name):
            self.news.here(name)
            self.write_back.promoted(name)

    def _promote(self, names: Sequence[bytes]) -> None:
        """Copies blocks up from host memory, into blocks that the caller owns from here on. There must be room."""
        self.host.promote(names, self._take, self._name)

    def _left_host(self, name: bytes) -> None:
        if name not in self.cache:
            self._lost(name)

    def _lost(self, name: bytes) -> None:
        """Neither tier has it any more."""
        self.news.gone(name)
        self.write_back.gone(name)
        self.counts.yielded += self.retention.forget(name)

    # ------------------------------------------------------------------------------------------ integrity

    def check_integrity(self, requests: Iterable[Request]) -> list[str]:
        """What is wrong, given all requests that may own blocks; empty if every block is accounted for."""
        problems: list[str] = []
        expected = Counter(self._held)
        host_used: Counter[int] = Counter()
        for request in requests:
            expected.update(request.block_ids)
            host_used.update(request.host_block_ids)
        empty = Counter(self._empty)
        for block in self._blocks:
            name, places = f"block {block.block_id}", (empty[block.block_id], block.block_id in self._cached)
            if block.ref_cnt != expected[block.block_id]:
                problems.append(f"{name} has ref_cnt {block.ref_cnt}, but {expected[block.block_id]} owners")
            if sum(places) + (block.ref_cnt > 0) != 1:
                problems.append(f"{name} is in {sum(places)} free lists with ref_cnt {block.ref_cnt}")
            if places[1] and not self.cache.has_name(block.block_id):
                problems.append(f"{name} is cached without a name")
        for block_id in self._cached:
            if self._cached.key(block_id) != (
                self.cache.name_of(block_id) in self.retention,
                self._blocks[block_id].freed_at,
            ):
                problems.append(f"block {block_id} is out of the order of eviction")
        if self._cached.num_retained != sum(self._cached.key(block_id)[0] for block_id in self._cached):
            problems.append(f"{self._cached.num_retained} retained blocks were counted, and there are others")
        problems += self.cache.check_integrity() + self.write_back.check_integrity()
        problems += self.retention.check_integrity(self.names())
        return problems + self.host.pool.check_integrity(host_used)
