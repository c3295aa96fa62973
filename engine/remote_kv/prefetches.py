"""Brings blocks onto the device before a request asks for them: from host memory, and from the store.

Prefetches have the lowest priority. One goes on at a time, a few blocks at a time, and only while no request waits and
nothing else is being moved. Tenants take turns, and if too many prefetches wait, the tenant that has most of them loses
its last one. A prefetch evicts no retained block, and leaves the last eighth of the blocks to requests. A prefetch that
takes too long is given up; the blocks that it brought stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine import messages as m
from engine.blocks.block_manager import BlockManager
from engine.blocks.host_tier import BlockCopy
from engine.remote_kv.transfers import Transfers
from kv_store.base import BlockRef, FetchBlock, KVConnector, Lookup

TIMEOUT_S = 8.0
MAX_WAITING = 16
TOO_MANY = "too many prefetches wait"
GROUP_BLOCKS = 16  # fetched at a time: a request that comes meanwhile waits for so many at most
SPARED_SHARE = 8  # one of so many blocks is left for requests


@dataclass(slots=True)
class _Prefetch:
    call_id: int
    tenant: str
    names: Sequence[bytes]
    give_up: float  # on the caller's clock
    num_from_host: int = 0
    num_from_store: int = 0
    lookup: Lookup | None = None
    lookup_start: int = 0  # index of the first name that the store was asked for
    in_flight: dict[int, int] = field(default_factory=dict)  # indexes of names: blocks that they are fetched into
    num_here: int = 0  # leading names that the device had at the last look
    touched_at: int = -1  # `BlockPool.num_frees` when nothing was newer than its blocks
    failure: str = ""
    is_evicted: bool = False  # a caller wants names of it forgotten: none is given to a block again

    @property
    def request_id(self) -> str:
        """The id of its transfers, which no request has."""
        return f"\nprefetch {self.call_id}"


class Prefetches:
    def __init__(
        self, blocks: BlockManager, store: KVConnector, transfers: Transfers, emit: Callable[[m.Event], None]
    ) -> None:
        self._blocks = blocks
        self._store = store
        self._transfers = transfers
        self._emit = emit
        self.waiting: list[_Prefetch] = []

    def __contains__(self, request_id: str) -> bool:
        return any(one.request_id == request_id for one in self.waiting)

    def start(self, call_id: int, tenant: str, names: Sequence[bytes], now: float) -> None:
        one = _Prefetch(call_id, tenant, names, now + TIMEOUT_S)
        num_waiting = Counter(other.tenant for other in self.waiting)
        if len(self.waiting) >= MAX_WAITING:
            largest, num_most = num_waiting.most_common(1)[0]
            if num_most <= num_waiting[tenant] + 1:
                self._answer(one, TOO_MANY)
                return
            # The largest tenant has at least two prefetches here, so its last one is not the first of all, which may
            # have begun.
            last = next(other for other in reversed(self.waiting) if other.tenant == largest)
            self.waiting.remove(last)
            self._answer(last, TOO_MANY)
        self.waiting.insert(self._position(num_waiting[tenant]), one)

    def _position(self, num_before: int) -> int:
        """Where to insert a prefetch whose tenant has `num_before` prefetches waiting: tenants take turns, so it comes
        after the prefetch number `num_before`, counted from 0, of every other tenant."""
        seen: Counter[str] = Counter()
        for position, other in enumerate(self.waiting):
            if seen[other.tenant] > num_before:
                return position
            seen[other.tenant] += 1
        return len(self.waiting)

    def go_on(self, now: float, carry_out: Callable[[list[BlockCopy]], None], *, may_move: bool) -> bool:
        """Does what can be done now, and moves one group of blocks at most. Only while no step is under way, since it
        takes blocks. `may_move`: no request waits. Returns whether it could go on at once."""
        self._answer_overdue(now)
        while self.waiting and not self.waiting[0].in_flight:
            one = self.waiting[0]
            num_before = one.num_from_host
            reason = one.failure or self._next(one, carry_out, may_move=may_move)
            if reason is None:
                return one.num_from_host > num_before
            del self.waiting[0]
            self._answer(one, reason)
        return False

    def evicted(self, names: Iterable[bytes]) -> None:
        """A caller evicts these names: prefetches that would bring one of them back end."""
        gone = set(names)
        for one in self.waiting:
            if not gone.isdisjoint(one.names):
                one.is_evicted, one.failure = True, "its blocks were evicted meanwhile"

    def _answer_overdue(self, now: float) -> None:
        """Answers prefetches that are overdue. If a prefetch's fetch is under way, it is answered when the fetch has
        ended, and does not hold up later prefetches."""
        overdue = [one for one in self.waiting if now >= one.give_up and not one.in_flight]
        self.waiting = [one for one in self.waiting if one not in overdue]
        for one in overdue:
            is_whole = self._blocks.named.count_on_device(one.names) == len(one.names)
            late = "" if is_whole else f"the worker had no time for it within {TIMEOUT_S:g} s"
            self._answer(one, one.failure or late)

    def ended(self, request_id: str, arrived: Sequence[int], lost: Sequence[int], failure: str) -> None:
        """Fetches of these blocks, by index, have ended."""
        one = next(one for one in self.waiting if one.request_id == request_id)
        is_newest = one.touched_at == self._blocks.pool.num_frees
        for index in reversed(arrived):
            block_id = one.in_flight.pop(index)
            if one.is_evicted:
                self._blocks.unhold(block_id)
            else:
                self._blocks.named.keep_prefetched(block_id, one.names[index])
                one.num_from_store += 1
        if is_newest:
            one.touched_at = self._blocks.pool.num_frees
        for index in lost:
            self._blocks.unhold(one.in_flight.pop(index))
            one.failure = one.failure or failure

    def _next(self, one: _Prefetch, carry_out: Callable[[list[BlockCopy]], None], *, may_move: bool) -> str | None:
        """Moves the next group. Returns None if more may come, or else why nothing more does; empty if nothing more is
        missing. What it costs grows with the group, not with the prompt, unless blocks were taken away meanwhile."""
        if one.lookup is not None and one.lookup.num_blocks is None:
            return None
        blocks, num_here = self._blocks, self._count_here(one)
        if num_here == len(one.names):
            return ""
        if not may_move or not self._transfers.may_write:
            return None
        num_spare = self._num_spare(one)
        if num_spare <= 0:
            return "no KV block is to spare"
        num_most = min(num_spare, GROUP_BLOCKS)
        group = one.names[num_here : num_here + num_most]
        if num_in_host := blocks.named.count_in_host(group):
            self._touch(one, num_in_host)
            is_newest = one.touched_at == blocks.pool.num_frees
            blocks.named.bring_up(group[:num_in_host])
            if is_newest:
                one.touched_at = blocks.pool.num_frees
            carry_out(blocks.take_copies())
            one.num_from_host += num_in_host
            return None
        if one.lookup is None or num_here < one.lookup_start:
            one.lookup, one.lookup_start = self._store.start_lookup(one.names[num_here:]), num_here
        if one.lookup.num_blocks is None:
            return None
        num_stored = one.lookup_start + one.lookup.num_blocks - num_here
        if num_stored <= 0:
            return "the rest is not stored"
        self._fetch(one, num_here, min(num_stored, num_most), carry_out)
        return None

    def _count_here(self, one: _Prefetch) -> int:
        """Counts leading names that the device has. Starts where the last count ended if that block is still there; the
        final count looks at all."""
        blocks, names = self._blocks, one.names
        is_as_before = not one.num_here or blocks.named.count_on_device(names, one.num_here - 1, one.num_here)
        first = one.num_here if is_as_before else 0
        one.num_here = first + blocks.named.count_on_device(names, first)
        if first and one.num_here == len(names):
            one.num_here = blocks.named.count_on_device(names)
        return one.num_here

    def _num_spare(self, one: _Prefetch) -> int:
        """How many blocks it may take. It looks at its own blocks one by one only if there may be fewer than a
        group."""
        blocks = self._blocks
        spared = blocks.num_blocks // SPARED_SHARE
        num_at_least = blocks.num_available_blocks - blocks.pool.num_retained_cached_blocks - one.num_here - spared
        if num_at_least >= GROUP_BLOCKS:
            return num_at_least
        return blocks.named.num_spare_blocks(one.names[: one.num_here]) - spared

    def _touch(self, one: _Prefetch, num_wanted: int) -> None:
        """Call before `num_wanted` blocks are taken: touches its own blocks, so that they are not the oldest ones and
        evicted for its next group."""
        blocks = self._blocks
        if one.touched_at < 0 or (one.touched_at != blocks.pool.num_frees and num_wanted > blocks.num_empty_blocks):
            blocks.named.touch(one.names[: one.num_here])
            one.touched_at = blocks.pool.num_frees

    def _fetch(self, one: _Prefetch, first: int, num: int, carry_out: Callable[[list[BlockCopy]], None]) -> None:
        blocks = self._blocks
        wanted = [
            index
            for index in range(first, first + num)
            if not blocks.named.count_on_device(one.names, index, index + 1)
        ]
        self._touch(one, len(wanted))
        one.in_flight = dict(zip(wanted, blocks.pool.take_held(len(wanted)), strict=True))
        carry_out(blocks.take_copies())  # of what was evicted, before other bytes land there
        fetches = [
            FetchBlock(BlockRef(index=index, block_hash=one.names[index]), block_id)
            for index, block_id in one.in_flight.items()
        ]
        self._transfers.fetch_stored(one.request_id, fetches)

    def _answer(self, one: _Prefetch, reason: str) -> None:
        num_here = self._blocks.named.count_on_device(one.names)
        if one.num_from_host or one.num_from_store:
            self._blocks.named.touch(one.names[:num_here])  # the end of a prompt is evicted before its beginning
        self._emit(
            m.CacheHinted(
                call_id=one.call_id,
                num_device_blocks=num_here,
                num_host_blocks=one.num_from_host,
                num_stored_blocks=one.num_from_store,
                failure=reason,
            )
        )
