"""Brings blocks onto the device before a request asks for them: from host memory, and from the store.

Whatever else this worker does comes first. One prefetch goes on at a time, a few blocks at a time, and only while no
request waits and nothing else is being moved. It takes blocks that nobody misses: none that is retained, and not the
last eighth. What is not done in time is given up, and what came until then stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine import messages as m
from engine.blocks.block_manager import BlockManager
from engine.blocks.host_tier import HostCopy
from engine.remote_kv.transfers import Transfers
from kv_store.base import BlockRef, FetchBlock, KVConnector, Lookup

TIMEOUT_S = 8.0
MAX_WAITING = 16
GROUP_BLOCKS = 16  # fetched at a time: a request that comes meanwhile waits for so many at most
SPARED_SHARE = 8  # one of so many blocks is left for requests


@dataclass(slots=True)
class _Prefetch:
    call_id: int
    names: Sequence[bytes]
    give_up: float  # on the caller's clock
    num_from_host: int = 0
    num_from_store: int = 0
    lookup: Lookup | None = None
    lookup_start: int = 0  # index of the first name that the store was asked for
    in_flight: dict[int, int] = field(default_factory=dict)  # indexes of names: blocks that they are fetched into
    failure: str = ""

    @property
    def request_id(self) -> str:
        """For its transfers. No request has such a one."""
        return f"\nprefetch {self.call_id}"


class Prefetches:
    def __init__(
        self, blocks: BlockManager, store: KVConnector, transfers: Transfers, emit: Callable[[m.Event], None]
    ) -> None:
        self._blocks = blocks
        self._store = store
        self._transfers = transfers
        self._emit = emit
        self._waiting: list[_Prefetch] = []

    def __contains__(self, request_id: str) -> bool:
        return any(one.request_id == request_id for one in self._waiting)

    def start(self, call_id: int, names: Sequence[bytes], now: float) -> None:
        one = _Prefetch(call_id, names, now + TIMEOUT_S)
        if len(self._waiting) >= MAX_WAITING:
            self._answer(one, "too many prefetches wait")
        else:
            self._waiting.append(one)

    def go_on(self, now: float, carry_out: Callable[[list[HostCopy]], None], *, may_move: bool) -> None:
        """Does what can be done now. Only while no step is under way, since it takes blocks. `may_move`: no request
        waits."""
        while self._waiting and not self._waiting[0].in_flight:
            one = self._waiting[0]
            reason = one.failure or self._next(one, carry_out, may_move=may_move)
            if reason is None and now >= one.give_up:
                reason = f"the worker had no time for it within {TIMEOUT_S:g} s"
            if reason is None:
                return
            del self._waiting[0]
            self._answer(one, reason)

    def ended(self, request_id: str, arrived: Sequence[int], lost: Sequence[int], failure: str) -> None:
        """Fetches of blocks, by their indexes."""
        one = next(one for one in self._waiting if one.request_id == request_id)
        for index in reversed(arrived):
            self._blocks.keep_prefetched(one.in_flight.pop(index), one.names[index])
        for index in lost:
            self._blocks.unhold(one.in_flight.pop(index))
            one.failure = failure
        one.num_from_store += len(arrived)

    def _next(self, one: _Prefetch, carry_out: Callable[[list[HostCopy]], None], *, may_move: bool) -> str | None:
        """Goes on with a prefetch. Returns None if it has to wait, or else why nothing more comes; empty if nothing
        more is missing."""
        blocks = self._blocks
        while True:
            num_here = blocks.count_on_device(one.names)
            missing = one.names[num_here:]
            if not missing:
                return ""
            if not may_move or not self._transfers.may_write:
                return None
            num_spare = blocks.num_spare_blocks(one.names[:num_here]) - blocks.num_blocks // SPARED_SHARE
            if num_spare <= 0:
                return "no KV block is to spare"
            if num_in_host := min(blocks.count_in_host(missing), num_spare, GROUP_BLOCKS):
                blocks.touch(one.names[:num_here])
                blocks.bring_up(missing[:num_in_host])
                carry_out(blocks.take_copies())
                one.num_from_host += num_in_host
                continue
            if one.lookup is None or num_here < one.lookup_start:
                one.lookup, one.lookup_start = self._store.start_lookup(missing), num_here
            if one.lookup.num_blocks is None:
                return None
            num_stored = one.lookup_start + one.lookup.num_blocks - num_here
            if num_stored <= 0:
                return "the rest is not stored"
            self._fetch(one, num_here, min(num_stored, num_spare, GROUP_BLOCKS), carry_out)
            return None

    def _fetch(self, one: _Prefetch, first: int, num: int, carry_out: Callable[[list[HostCopy]], None]) -> None:
        blocks = self._blocks
        blocks.touch(one.names[:first])
        wanted = [
            index for index in range(first, first + num) if not blocks.count_on_device(one.names[index : index + 1])
        ]
        one.in_flight = dict(zip(wanted, blocks.take_held(len(wanted)), strict=True))
        carry_out(blocks.take_copies())  # of what was evicted, before other bytes land there
        fetches = [
            FetchBlock(BlockRef(index=index, block_hash=one.names[index]), block_id)
            for index, block_id in one.in_flight.items()
        ]
        self._transfers.fetch_stored(one.request_id, fetches)

    def _answer(self, one: _Prefetch, reason: str) -> None:
        self._emit(
            m.CacheHinted(
                call_id=one.call_id,
                num_device_blocks=self._blocks.count_on_device(one.names),
                num_host_blocks=one.num_from_host,
                num_stored_blocks=one.num_from_store,
                failure=reason,
            )
        )
