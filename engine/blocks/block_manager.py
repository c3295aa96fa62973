"""Who owns which KV block. Pure bookkeeping: no tensor, no clock.

A block is in exactly one of three states:

    empty    nobody refers to it, and it holds nothing worth keeping
    cached   nobody refers to it, but it holds a full block that can be found by its hash; evicted when room is needed
    owned    ref_cnt > 0: by requests that share it, and by transfers that read or write it

    allocate/append: empty or cached (evicting) -> owned      match: cached -> owned
    free:            owned -> cached (has a hash) or empty    reset: cached -> empty

Eviction takes the cached block that requests gave up the longest ago. `free` returns a request's blocks last one
first, so that of equally old blocks the one furthest from the root goes first; a transfer that held a block meanwhile
changes nothing about that.

Below the device there may be host memory (`HostBlocks`): what is evicted is copied there, and copied up when it is
found. A lookup goes on from tier to tier, block by block. The copies are decided here and carried out by the engine, in
their order and before it computes; on a device, all on one stream. A name may be on the device and in host memory at
once: its next eviction then costs no copy.

Where there is a store below that (`UnstoredBlocks`), computed blocks wait for their turn to be written to it, by name
and without being held. What is gone from both tiers before its turn has come is dropped.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.block_hash import block_hash
from common.errors import InternalError
from engine.batch import BlockCopy
from engine.blocks.host_blocks import HostBlocks
from engine.blocks.unstored_blocks import UnstoredBlocks
from engine.request import Request
from kv_store.base import LocalBlock


@dataclass(slots=True)
class KVBlock:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None  # set while the block can be found by it
    freed_at: int = 0  # when a request last gave it up, on the block manager's own count


@dataclass(slots=True)
class CacheCounts:
    """What happened to cached blocks; all are numbers of blocks."""

    device_hits: int = 0  # of prompts when first admitted
    host_hits: int = 0
    store_hits: int = 0  # fetched
    demoted: int = 0  # device to host memory
    promoted: int = 0  # host memory to device
    swapped_out: int = 0  # device to host memory, with their request
    stored: int = 0  # computed here and written to the store
    dropped: int = 0  # computed here, and gone or failed before the store had them


class HostCopyKind(StrEnum):
    SWAP_OUT = "swap out"  # device to host: a request gives its blocks up for a while
    SWAP_IN = "swap in"
    DEMOTE = "demote"  # device to host: a named block is evicted
    PROMOTE = "promote"


@dataclass(slots=True, frozen=True)
class HostCopy:
    """Copy one whole block between the device's cache and the host's."""

    kind: HostCopyKind
    device_block: int
    host_block: int

    @property
    def to_host(self) -> bool:
        return self.kind in (HostCopyKind.SWAP_OUT, HostCopyKind.DEMOTE)


class BlockManager:
    """Allocates, shares, names and evicts the blocks of one KV cache."""

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
    ) -> None:
        """`num_host_blocks` are for swapped requests and, with `keep_evicted`, for what the device evicts."""
        self.block_size = block_size
        self._root_hash = root_hash
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self._empty = deque(range(num_blocks))
        self._evictable: dict[int, int] = {}  # cached blocks: freed_at
        self._eviction_order: list[tuple[int, int]] = []  # heap of (freed_at, block), those not evictable any more too
        self._num_frees = 0
        self._by_hash: dict[bytes, int] = {}
        self.host = HostBlocks(num_host_blocks)
        self._keep_evicted = keep_evicted
        self._copies: list[HostCopy] = []
        self.counts = CacheCounts()
        self._num_dropped_before = 0  # in the counts that were taken
        self._held: Counter[int] = Counter()  # references of transfers
        self.unstored = UnstoredBlocks() if has_store and enable_prefix_caching else None

    # ------------------------------------------------------------------------------------------- counts

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_empty_blocks(self) -> int:
        return len(self._empty)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._evictable)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that an allocation could get: empty ones and cached ones."""
        return len(self._empty) + len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------------------- names and prefix cache

    def name_full_blocks(self, request: Request) -> None:
        """Extends `request.block_hashes` to all full blocks of its tokens."""
        hashes = request.block_hashes
        while (len(hashes) + 1) * self.block_size <= request.num_tokens:
            hashes.append(self._hash_of(request, len(hashes), (len(hashes) + 1) * self.block_size))

    def tail_hash(self, request: Request) -> bytes:
        """Name of the prompt's last block where the prompt fills it only in part."""
        self.name_full_blocks(request)
        index = request.num_prompt_tokens // self.block_size
        return self._hash_of(request, index, request.num_prompt_tokens)

    def name_in_prompt(self, request: Request, index: int) -> bytes:
        """Name of block `index` of the prompt, be it full or the tail: what a prefill worker announces it as."""
        if (index + 1) * self.block_size > request.num_prompt_tokens:
            return self.tail_hash(request)
        self.name_full_blocks(request)
        return request.block_hashes[index]

    def _hash_of(self, request: Request, index: int, stop: int) -> bytes:
        parent = request.block_hashes[index - 1] if index else self._root_hash
        return block_hash(parent, request.token_ids[index * self.block_size : stop], request.extra_keys)

    def find_prefix(self, request: Request) -> int:
        """How many of the request's leading full blocks are here, be it on the device or in host memory.

        One token at least is left to compute, since only a computed token gives logits.
        """
        if not self.enable_prefix_caching:
            return 0
        self.name_full_blocks(request)
        names = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        for num_found, name in enumerate(names):
            if not self._is_here(name):
                return num_found
        return len(names)

    def _is_here(self, name: bytes) -> bool:
        return name in self._by_hash or name in self.host

    def name_computed(self, request: Request) -> None:
        """Makes the full blocks below `request.num_computed_tokens` findable. Of equal blocks the first one stays."""
        if not self.enable_prefix_caching:
            return
        self.name_full_blocks(request)
        num_full = request.num_computed_tokens // self.block_size
        for index in range(request.num_named_blocks, num_full):
            block, name = self._blocks[request.block_ids[index]], request.block_hashes[index]
            if block.block_hash is None and name not in self._by_hash:
                self._name(block, name)
        request.num_named_blocks = num_full

    def find(self, name: bytes) -> int | None:
        """The block of this name, where one is here."""
        return self._by_hash.get(name)

    def name_arrived(self, request: Request, index: int) -> None:
        """Makes a full block that was fetched findable, whatever is missing before it."""
        block, name = self._blocks[request.block_ids[index]], request.block_hashes[index]
        if block.block_hash is None and name not in self._by_hash:
            self._name(block, name)
        self.mark_stored([name])  # whoever computed it writes it to the store

    def adopt(self, request: Request, index: int) -> bool:
        """Makes block `index` of the request the one of that name, giving up its own; False where none is here."""
        found = self._by_hash.get(request.block_hashes[index])
        if found is None:
            return False
        if found != request.block_ids[index]:
            self.take_over(request, index, found)
        return True

    def take_over(self, request: Request, index: int, block_id: int) -> None:
        """Puts a block that others own, or that is cached, in the place of the request's own."""
        self._share(block_id)
        self._drop(request.block_ids[index])
        request.block_ids[index] = block_id

    def replace(self, request: Request, index: int) -> None:
        """Gives the request another block of its own in that place, with no content. One must be available."""
        self._drop(request.block_ids[index])
        request.block_ids[index] = self._take()

    def adopt_computed(self, request: Request) -> None:
        """Skips blocks that are here by now, computed by another request, or fetched out of order. Names them all."""
        size = self.block_size
        self.name_full_blocks(request)
        if request.num_computed_tokens % size:
            return
        index, stop = request.num_computed_tokens // size, (request.num_tokens - 1) // size
        while index < stop and self.adopt(request, index):
            index += 1
        request.num_computed_tokens = index * size

    def reset_prefix_cache(self) -> None:
        """Forgets every name; blocks in use stay in use, unfindable."""
        for block in self._blocks:
            block.block_hash = None
        self._by_hash.clear()
        self._empty.extend(self._evictable)
        self._evictable.clear()
        self._eviction_order.clear()
        self.host.clear()
        if self.unstored is not None:
            self.unstored.clear()

    # -------------------------------------------------------------------------------------- to the store

    def offer(self, request: Request) -> None:
        """Queues the request's computed full blocks to be written to the store, where it is not known to hold them."""
        if self.unstored is None:
            return
        self.name_full_blocks(request)
        for index, name in enumerate(request.block_hashes[: request.num_computed_tokens // self.block_size]):
            if name in self._by_hash:
                self.unstored.offer(name, index)

    def end_write(self, name: bytes, *, is_stored: bool, is_new: bool) -> None:
        """The write of a block that `next_unstored` gave has ended; `is_new` where the store did not have it before."""
        self.counts.stored += is_stored and is_new
        if self.unstored is not None:
            self.unstored.end(name, is_stored=is_stored)
        if is_stored:
            self.mark_stored([name])

    def mark_stored(self, names: Iterable[bytes]) -> None:
        """The store holds these now, or another worker is about to bring them there."""
        if self.unstored is not None:
            self.unstored.mark_stored(name for name in names if self._is_here(name))

    def age_stored(self) -> None:
        """What the store is known to hold is written again when it is used next, unless the store still has it."""
        if self.unstored is not None:
            self.unstored.age()

    def doubt_stored(self, names: Iterable[bytes]) -> None:
        """The store seems to lack these by now."""
        if self.unstored is not None:
            self.unstored.doubt(names)

    def next_unstored(self, group_tokens: int) -> list[LocalBlock]:
        """The next run of neighbouring blocks to be written, up to an index of a multiple of `group_tokens`."""
        if self.unstored is None:
            return []
        run = self.unstored.next_run(max(group_tokens // self.block_size, 1))
        return [LocalBlock(index, self._by_hash[name], name) for name, index in run]

    def bring_up_unstored(self, group_tokens: int) -> None:
        """Copies up a run of what only host memory has and the store lacks, in the place of what would be evicted next,
        and queues it to be written. Only while no step is under way, since it takes blocks."""
        if self.unstored is None:
            return
        names = self.unstored.next_below(max(group_tokens // self.block_size, 1), self.num_available_blocks)
        self._promote(names)
        for name in names:
            block = self._blocks[self._by_hash[name]]
            block.freed_at = 0  # nobody asked for it
            self._drop(block.block_id)

    # ------------------------------------------------------------------------------------ allocate and free

    def allocate(self, request: Request, num_tokens: int, num_found: int = 0) -> bool:
        """Gives a request without blocks its first `num_found` blocks (see `find_prefix`), shared where the device has
        them and copied up where host memory has, and new blocks up to `num_tokens`; all or nothing."""
        if request.block_ids:
            raise ValueError(f"request {request.request_id} already has blocks")
        names = request.block_hashes[:num_found]
        shared = [self._by_hash[name] for name in names if name in self._by_hash]
        num_blocks = max(self.blocks_for(num_tokens), num_found)
        num_revived = sum(self._blocks[block_id].ref_cnt == 0 for block_id in shared)
        if num_blocks - len(shared) > self.num_available_blocks - num_revived:
            return False
        for block_id in shared:
            self._share(block_id)
        self._promote([name for name in names if name not in self._by_hash])
        request.block_ids = [self._by_hash[name] for name in names]
        request.block_ids += [self._take() for _ in range(num_blocks - num_found)]
        return True

    def append(self, request: Request, num_tokens: int) -> bool:
        """Grows the block table to hold `num_tokens`; all or nothing."""
        num_new = self.blocks_for(num_tokens) - len(request.block_ids)
        if num_new > self.num_available_blocks:
            return False
        request.block_ids.extend(self._take() for _ in range(num_new))
        return True

    def free(self, request: Request) -> None:
        """Gives up all of the request's blocks."""
        self._give_up(request)
        self.host.free(request.host_block_ids)
        request.host_block_ids = []

    # --------------------------------------------------------------------------------- share, copy and swap

    def fork(self, parent: Request, child: Request) -> None:
        """Gives `child` the same blocks as `parent`; the first to write into one copies it."""
        if child.block_ids:
            raise ValueError(f"request {child.request_id} already has blocks")
        for block_id in parent.block_ids:
            self._share(block_id)
        child.block_ids = list(parent.block_ids)
        child.num_computed_tokens = parent.num_computed_tokens

    def copy_on_write(self, request: Request, index: int) -> BlockCopy | None:
        """Makes block `index` safe to write; the copy to carry out first, or None where it is not shared.

        Raises `MemoryError` where no block is left; callers make room first.
        """
        source = request.block_ids[index]
        if self._blocks[source].ref_cnt == 1:
            return None
        if not self.num_available_blocks:
            raise MemoryError("no KV block is left for a copy-on-write")
        target = self._take()
        request.block_ids[index] = target
        self._drop(source)
        return BlockCopy(source, target)

    def swap_out(self, request: Request) -> bool:
        """Moves a request to host memory; False, and nothing done, where that is full."""
        if len(request.block_ids) > self.host.num_available_blocks:
            return False
        for block_id in request.block_ids:
            host_block = self._take_host()
            if host_block is None:
                raise InternalError("host memory has fewer blocks than it said")
            request.host_block_ids.append(host_block)
            self._copies.append(HostCopy(HostCopyKind.SWAP_OUT, block_id, host_block))
        self.counts.swapped_out += len(request.block_ids)
        self._give_up(request)
        return True

    def swap_in(self, request: Request) -> bool:
        """Brings a swapped request back; False, and nothing done, where there is no room for it and its next token."""
        if max(len(request.host_block_ids), self.blocks_for(request.num_tokens)) > self.num_available_blocks:
            return False
        for host_block in request.host_block_ids:
            request.block_ids.append(self._take())
            self._copies.append(HostCopy(HostCopyKind.SWAP_IN, request.block_ids[-1], host_block))
        self.host.free(request.host_block_ids)
        request.host_block_ids = []
        return True

    def take_counts(self) -> CacheCounts:
        """What was counted since the last call."""
        if self.unstored is not None:
            self.counts.dropped = self.unstored.num_dropped - self._num_dropped_before
            self._num_dropped_before = self.unstored.num_dropped
        counts, self.counts = self.counts, CacheCounts()
        return counts

    def take_copies(self) -> list[HostCopy]:
        """Copies decided since the last call. Carry them out in this order, before the blocks are used."""
        copies, self._copies = self._copies, []
        return copies

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
            block_id = self._next_evicted()
            self._forget(self._blocks[block_id])
        self._blocks[block_id].ref_cnt = 1
        return block_id

    def _give_up(self, request: Request) -> None:
        for block_id in reversed(request.block_ids):
            self._num_frees += 1
            self._blocks[block_id].freed_at = self._num_frees
            self._drop(block_id)
        request.block_ids = []
        request.num_named_blocks = 0

    def _next_evicted(self) -> int:
        while True:
            freed_at, block_id = heapq.heappop(self._eviction_order)
            if self._evictable.get(block_id) == freed_at:
                del self._evictable[block_id]
                return block_id

    def _make_evictable(self, block: KVBlock) -> None:
        if len(self._eviction_order) > 2 * len(self._blocks):  # most of it is out of date
            self._eviction_order = [(freed_at, block_id) for block_id, freed_at in self._evictable.items()]
            heapq.heapify(self._eviction_order)
        self._evictable[block.block_id] = block.freed_at
        heapq.heappush(self._eviction_order, (block.freed_at, block.block_id))

    def _share(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.ref_cnt == 0:
            if block_id not in self._evictable:
                raise ValueError(f"block {block_id} is empty and cannot be shared")
            del self._evictable[block_id]
        block.ref_cnt += 1

    def _drop(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.ref_cnt == 0:
            raise ValueError(f"block {block_id} is freed twice")
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            if block.block_hash is None:
                self._empty.append(block_id)
            else:
                self._make_evictable(block)

    def _name(self, block: KVBlock, name: bytes) -> None:
        block.block_hash = name
        self._by_hash[name] = block.block_id
        if self.unstored is not None:
            self.unstored.promote(name)

    def _forget(self, block: KVBlock) -> None:
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            if not self._demote(block.block_id, block.block_hash) and self.unstored is not None:
                self.unstored.forget(block.block_hash)
            block.block_hash = None

    def _demote(self, block_id: int, name: bytes) -> bool:
        """Sees to it that host memory holds an evicted block; False where it does not."""
        if name in self.host:
            self.host.touch(name)
        else:
            host_block = self._take_host() if self._keep_evicted else None
            if host_block is None:
                return False
            self.host.keep(name, host_block)
            self._copies.append(HostCopy(HostCopyKind.DEMOTE, block_id, host_block))
            self.counts.demoted += 1
        if self.unstored is not None:
            self.unstored.demote(name)
        return True

    def _promote(self, names: Sequence[bytes]) -> None:
        """Copies blocks up from host memory, into blocks that the caller owns from here on. There must be room."""
        # Owned meanwhile, so that what is evicted for them does not take their place.
        host_blocks = [self.host.take_named(name) for name in names]
        for name, host_block in zip(names, host_blocks, strict=True):
            block = self._blocks[self._take()]
            self._copies.append(HostCopy(HostCopyKind.PROMOTE, block.block_id, host_block))
            self._name(block, name)
        for name, host_block in reversed(list(zip(names, host_blocks, strict=True))):
            self.host.keep(name, host_block)
        self.counts.promoted += len(names)

    def _take_host(self) -> int | None:
        taken = self.host.take()
        if taken is None:
            return None
        host_block, evicted = taken
        if evicted is not None and evicted not in self._by_hash and self.unstored is not None:
            self.unstored.forget(evicted)
        return host_block

    # -------------------------------------------------------------------------------------------- integrity

    def check_integrity(self, requests: Iterable[Request]) -> list[str]:
        """What is wrong, given all requests that may own blocks; empty where every block is accounted for."""
        problems: list[str] = []
        expected = Counter(self._held)
        host_used: Counter[int] = Counter()
        for request in requests:
            expected.update(request.block_ids)
            host_used.update(request.host_block_ids)
        empty = Counter(self._empty)
        for block in self._blocks:
            name, places = f"block {block.block_id}", (empty[block.block_id], block.block_id in self._evictable)
            if block.ref_cnt != expected[block.block_id]:
                problems.append(f"{name} has ref_cnt {block.ref_cnt}, but {expected[block.block_id]} owners")
            if sum(places) + (block.ref_cnt > 0) != 1:
                problems.append(f"{name} is in {sum(places)} free lists with ref_cnt {block.ref_cnt}")
            if block.block_hash is None and places[1]:
                problems.append(f"{name} is cached without a name")
            if block.block_hash is not None and self._by_hash.get(block.block_hash) != block.block_id:
                problems.append(f"{name} has a name that finds another block")
        problems.extend(
            f"a name finds block {block_id}, which has another"
            for name_, block_id in self._by_hash.items()
            if self._blocks[block_id].block_hash != name_
        )
        if self.unstored is not None:
            names, queued = self.unstored.names(), self.unstored.queued_names()
            lost = (names - self._by_hash.keys() - self.host.names()) | (queued - self._by_hash.keys())
            problems.extend(f"{name.hex()} is said to be here for the store, but is not" for name in lost)
        return problems + self.host.check_integrity(host_used)
