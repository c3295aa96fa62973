"""Which KV blocks a request has. Pure bookkeeping: no tensor, no clock.

`free` returns a request's blocks in reverse order, so that the end of a prefix is evicted before its beginning, also if
the request gave up its first blocks while it ran.

Classes beside it know the rest: `BlockPool` knows each block's state and owners, `Tiers` which tier holds the content
of a name, and `NamedBlocks` answers what is asked by name and for no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set

from engine.blocks.block_pool import BlockPool
from engine.blocks.host_tier import BlockCopy
from engine.blocks.named_blocks import NamedBlocks
from engine.blocks.retention import Retention
from engine.blocks.tiers import Tiers
from engine.request import Request, block_table


class BlockManager:
    """Allocates, shares and frees the blocks of requests. `pool`, `tiers` and `named` are used through it."""

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
        self.tiers = Tiers(
            block_size,
            root_hash,
            Retention(int(num_blocks * retain_share), int(num_blocks * retain_tenant_share)),
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            keep_evicted=keep_evicted,
            has_store=has_store,
        )
        self.pool = BlockPool(num_blocks, self.tiers)
        self.named = NamedBlocks(self.pool, self.tiers)
        self.cache, self.news, self.host = self.tiers.cache, self.tiers.news, self.tiers.host
        self.retention, self.write_back, self.counts = self.tiers.retention, self.tiers.write_back, self.tiers.counts

    # ------------------------------------------------------------------------------------------- counts

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_empty_blocks(self) -> int:
        return self.pool.num_empty_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self.pool.num_cached_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that an allocation could get: empty ones and cached ones."""
        return self.pool.num_available_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def may_demote(self, num_tokens: int) -> bool:
        """Whether an allocation for so many tokens could copy evicted blocks to host memory."""
        return self.host.keeps_evicted and self.blocks_for(num_tokens) > self.num_empty_blocks

    # ------------------------------------------------------------------------------- find by name and share

    def names(self) -> Set[bytes]:
        """The names of all blocks that can be found, on the device or in host memory."""
        return self.tiers.names()

    def find_prefix(self, request: Request) -> int:
        """How many of the request's leading full blocks are here, on the device or in host memory."""
        names = self.cache.findable(request)
        for num_found, name in enumerate(names):
            if name not in self.tiers:
                return num_found
        return len(names)

    def has_all(self, request: Request) -> bool:
        """Whether the device has each block of a prompt of whole blocks."""
        self.cache.name_full_blocks(request)
        return self.cache.is_enabled and all(name in self.cache for name in request.block_hashes)

    def name_computed(self, request: Request) -> None:
        """Makes the full blocks below `request.num_computed_tokens` findable. Of equal blocks the first one stays."""
        if not self.cache.is_enabled:
            return
        self.cache.name_full_blocks(request)
        num_full = request.num_computed_tokens // self.block_size
        for index in range(request.num_named_blocks, num_full):
            self.tiers.put(request.block_ids[index], request.block_hashes[index])
        request.num_named_blocks = num_full

    def name_arrived(self, request: Request, index: int) -> None:
        """Makes a fetched full block findable, even if blocks before it are missing."""
        name = request.block_hashes[index]
        self.tiers.put(request.block_ids[index], name)
        self.write_back.mark_stored([name])  # the worker that computed it writes it to the store

    def adopt(self, request: Request, index: int) -> bool:
        """Replaces the request's block `index` by a cached block of the same name. False if the device has none."""
        found = self.cache.find(request.block_hashes[index])
        if found is None:
            return False
        if found != request.block_ids[index]:
            self.take_over(request, index, found)
        return True

    def adopt_computed(self, request: Request) -> None:
        """Takes over blocks that another request has computed by now, or that were fetched out of order, so that they
        are not computed again. Names them all."""
        size = self.block_size
        self.cache.name_full_blocks(request)
        if request.num_computed_tokens % size:
            return
        index, stop = request.num_computed_tokens // size, (request.num_tokens - 1) // size
        while index < stop and self.adopt(request, index):
            index += 1
        request.num_computed_tokens = index * size

    def take_over(self, request: Request, index: int, block_id: int) -> None:
        """Replaces the request's own block by one that others own or that is cached."""
        self.pool.share(block_id)
        self.pool.drop(request.block_ids[index])
        request.block_ids[index] = block_id

    def replace(self, request: Request, index: int) -> None:
        """Replaces the request's block in that place by an empty one. A block must be available."""
        self.pool.drop(request.block_ids[index])
        request.block_ids[index] = self.pool.take()

    def reset_prefix_cache(self) -> None:
        """Forgets every name; blocks in use stay in use, unfindable."""
        self.tiers.clear()
        self.pool.clear()

    # ------------------------------------------------------------------------------------ allocate and free

    def allocate(self, request: Request, num_tokens: int, num_found: int = 0) -> bool:
        """Gives a request without blocks its first `num_found` blocks (see `find_prefix`), shared if the device has
        them and copied up if host memory has, and new blocks up to `num_tokens`; all or nothing."""
        if request.block_ids:
            raise ValueError(f"request {request.request_id} already has blocks")
        names = request.block_hashes[:num_found]
        shared = [self.cache[name] for name in names if name in self.cache]
        num_blocks = max(self.blocks_for(num_tokens), num_found)
        if not self._has_room(num_blocks, shared):
            return False
        for block_id in shared:
            self.pool.share(block_id)
        self.named.promote([name for name in names if name not in self.cache])
        request.block_ids = block_table(self.cache[name] for name in names)
        request.block_ids.extend(self.pool.take() for _ in range(num_blocks - num_found))
        return True

    def may_allocate(self, request: Request) -> bool:
        """Whether `allocate` would give a request blocks for all of its tokens, with what is found of its prefix."""
        num_found = self.find_prefix(request)
        shared = [self.cache[name] for name in request.block_hashes[:num_found] if name in self.cache]
        return self._has_room(max(self.blocks_for(request.num_tokens), num_found), shared)

    def _has_room(self, num_blocks: int, shared: Sequence[int]) -> bool:
        """For so many blocks of one request, `shared` among them. Cached ones of those are no longer available then."""
        num_revived = sum(self.pool.is_cached(block_id) for block_id in shared)
        return num_blocks - len(shared) <= self.num_available_blocks - num_revived

    def num_lacking(self, request: Request, num_tokens: int) -> int:
        """How many blocks `append` would take."""
        return max(self.blocks_for(num_tokens) - len(request.block_ids), 0)

    def append(self, request: Request, num_tokens: int) -> bool:
        """Grows the block table to hold `num_tokens`; all or nothing."""
        num_new = self.num_lacking(request, num_tokens)
        if not num_new:
            return True
        if num_new > self.num_available_blocks:
            return False
        request.block_ids.extend(self.pool.take() for _ in range(num_new))
        return True

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Gives up the last blocks, beyond those that hold `num_tokens`. They have no name."""
        while len(request.block_ids) > self.blocks_for(num_tokens):
            self.pool.drop(request.block_ids.pop())

    def free(self, request: Request) -> None:
        """Gives up all of the request's blocks, on the device and in host memory; retains those that it asked for."""
        self._retain_prompt(request)
        self._give_up(request)
        self.host.pool.free(request.host_block_ids)
        request.host_block_ids = []

    def free_unseen(self, request: Request, first_seen: int) -> None:
        """Gives up the request's blocks all of whose tokens lie before token `first_seen`: no layer will see them
        again.

        The block table keeps its length. The oldest block that is still seen fills the places of those that are gone,
        so that the table never names a block of another request. That block must be full, since it may not be written
        any more.
        """
        stop = first_seen // self.block_size
        if stop <= request.num_unseen_blocks or stop >= request.num_computed_tokens // self.block_size:
            return
        stand_in = request.block_ids[stop]
        if not request.num_unseen_blocks:
            # Of those that it gives up while it runs, later ones are older: the end of a prefix is evicted first.
            request.unseen_since = self.pool.count_frees(self.num_blocks)
        num_unseen, former = request.num_unseen_blocks, request.block_ids[request.num_unseen_blocks]
        self.pool.share(stand_in, stop)
        for index in reversed(range(num_unseen, stop)):
            block_id = request.block_ids[index]
            self.pool.set_freed_at(block_id, request.unseen_since - index)
            self.pool.drop(block_id)
        if num_unseen:
            self.pool.drop(former, num_unseen)  # it stood in those places
        request.block_ids[:stop] = block_table([stand_in]) * stop
        request.num_unseen_blocks = stop

    def swap_out(self, request: Request) -> bool:
        """Moves a request to host memory. Returns False and changes nothing if host memory is full."""
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
        request.block_ids = block_table(self.pool.take() for _ in request.host_block_ids)
        self.host.swap_in(request.host_block_ids, request.block_ids)
        request.host_block_ids = []
        if num_unseen := request.num_unseen_blocks:
            self.pool.share(request.block_ids[0], num_unseen)
            request.block_ids[:0] = request.block_ids[:1] * num_unseen
        return True

    def take_copies(self) -> list[BlockCopy]:
        """See `HostTier.take_copies`."""
        return self.host.take_copies() if self.host.copies else []

    # ------------------------------------------------------------------------------------ retention and holds

    def expire_retention(self, now: float) -> None:
        """Ends the retention of names whose time is over."""
        if names := self.retention.expire(now):
            self.named.reorder(names)

    def hold(self, block_ids: Iterable[int]) -> None:
        """See `BlockPool.hold`."""
        self.pool.hold(block_ids)

    def unhold(self, block_id: int) -> None:
        self.pool.unhold(block_id)

    def begin_writes(self, block_ids: Collection[int]) -> None:
        """See `BlockPool.begin_writes`."""
        self.pool.begin_writes(block_ids)

    def end_writes(self, block_ids: Collection[int]) -> None:
        self.pool.end_writes(block_ids)

    # -------------------------------------------------------------------------------------------- internals

    def _retain_prompt(self, request: Request) -> None:
        if (asked := request.retain) is not None:
            num_tokens = min(asked.num_tokens or request.num_prompt_tokens, request.num_prompt_tokens)
            names = request.block_hashes[: num_tokens // self.block_size]
            self.named.retain(request.tenant, names, asked.seconds)

    def _give_up(self, request: Request) -> None:
        for block_id in reversed(request.block_ids):
            self.pool.give_back(block_id)
        # A later block is useless once an earlier one is gone, so blocks given up before get the same age.
        for name in reversed(request.block_hashes[: request.num_unseen_blocks]):
            found = self.cache.find(name)
            if found is not None and self.pool.is_cached(found):
                self.pool.set_freed_at(found, self.pool.count_frees())
        request.block_ids = block_table()  # another one: a step under way may read the old one
        request.num_named_blocks = request.num_unseen_blocks = 0

    # ------------------------------------------------------------------------------------------ integrity

    def check_integrity(self, requests: Iterable[Request]) -> list[str]:
        """What is wrong, given all requests that may own blocks; empty if every block is accounted for."""
        owned: Counter[int] = Counter()
        host_used: Counter[int] = Counter()
        for request in requests:
            owned.update(request.block_ids)
            host_used.update(request.host_block_ids)
        problems = self.pool.check_integrity(owned) + self.tiers.check_integrity()
        return problems + self.host.pool.check_integrity(host_used)
