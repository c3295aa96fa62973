"""The core's side of the door: messages and results of transfers go in, transfers and events come out.

It carries out what `WaitingRoom` decides, on the connector that hands prompts over and on the store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.errors import BatonError
from engine import messages as m
from engine.blocks.block_manager import BlockManager
from engine.blocks.host_tier import BlockCopy
from engine.remote_kv.loans import Loans
from engine.remote_kv.lookups import PendingLookups
from engine.remote_kv.prefetches import Prefetches
from engine.remote_kv.publications import Publish
from engine.remote_kv.transfers import Transfers, WrittenBlock
from engine.remote_kv.waiting_room import Settled, WaitingRoom
from engine.request import Request
from kv_store.base import BlockRef, Eviction, KVConnector, TransferKind, TransferResult

VERIFY_STORED_S = 60.0  # what the store took is believed to be there for this long, then looked at when it is used
WRITE_TOKENS = 256  # of one write to the store: stores keep so many together, and a handoff waits for one at most


@dataclass(slots=True)
class _TransferNews:
    """Transfers of one request that ended."""

    refs: list[BlockRef] = field(default_factory=list)
    published_lost: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    fetch_lost: list[int] = field(default_factory=list)
    failure: str = ""
    num_bytes: int = 0
    elapsed_s: float = 0.0  # of the slowest block, from the connector's call to its result

    def add(self, result: TransferResult, elapsed_s: float) -> None:
        self.num_bytes += result.num_bytes
        self.elapsed_s = max(self.elapsed_s, elapsed_s)
        self.failure = self.failure or result.error or ""
        if result.kind is TransferKind.FETCH:
            (self.arrived if result.error is None else self.fetch_lost).append(result.index)
        elif result.ref is not None:
            self.refs.append(result.ref)
        else:
            self.published_lost.append(result.index)


class RemoteKV:
    def __init__(
        self,
        handoff: KVConnector,
        store: KVConnector,
        blocks: BlockManager,
        clock: Callable[[], float],
        emit: Callable[[m.Event], None],
    ) -> None:
        """`emit` takes the events for the front, in their order. The scheduler has `room`, `Arrivals` `lookups`."""
        self.waiting_room = WaitingRoom(blocks, handoff_is_store=store is handoff)
        self.lookups = PendingLookups(store, blocks)
        self._transfers = Transfers(handoff, store, blocks, clock)
        self._loans = Loans(blocks)
        self._prefetches = Prefetches(blocks, store, self._transfers, emit)
        self._handoff = handoff
        self._store = store
        self._handoff_is_store = store is handoff
        self._blocks = blocks
        self._clock = clock
        self._emit = emit
        self.verify_at = clock() + VERIFY_STORED_S  # when `age_stored` is due
        self._write_failure = ""  # of the last write
        self._evicted_late: set[bytes] = set()  # names that are being written and should not be in the store

    # ---------------------------------------------------------------------------------- messages from the front

    def first_token(self, request_id: str) -> Request | None:
        """The prompt's first token is known. Returns the request to append it to; None if nobody waits for it."""
        return self.waiting_room.first_token(request_id)

    def lease_ended(self, request_id: str, reason: str) -> None:
        """The prefill worker may reuse its blocks from now on."""
        self.waiting_room.lease_ended(request_id, reason)

    def all_leases_ended(self, reason: str) -> None:
        self.waiting_room.all_leases_ended(reason)

    def prefill_failed(self, request_id: str, reason: str) -> None:
        """No prefill worker brings anything more."""
        self.waiting_room.failed(request_id, reason)

    def release(self, request_id: str) -> None:
        """The lease on what the request published has ended."""
        self._transfers.release(request_id)

    def published(self, message: m.RemoteBlocksPublished) -> None:
        self._transfers.fetch(message.request_id, self.waiting_room.published(message.request_id, message.blocks))
        self.waiting_room.not_published(message.request_id, message.failed_indexes, message.failure)

    def lend(self, request_id: str, first: int, stop: int) -> None:
        """Makes blocks of the prompt readable for the prefill worker that was asked for the rest of it."""
        lent = self.waiting_room.lendable(request_id, first, stop)
        if lent:
            self._loans.begin(request_id, lent)
            self._transfers.publish(request_id, lent)
        if missing := sorted({*range(first, stop)} - {block.index for block in lent}):
            self._emit(m.BlocksPublished(request_id, [], missing, "the decode worker does not have it any more", 0.0))

    def end_loan(self, request_id: str) -> None:
        if request_id in self._loans:
            self._transfers.release(request_id)
            self._loans.end(request_id)

    def add_peer(self, peer: bytes) -> str:
        """Returns why the peer's cache cannot be reached, if so: fetches from it will fail, each with its request's
        id."""
        try:
            self._handoff.add_peer(peer)
        except BatonError as error:
            return str(error)
        return ""

    # -------------------------------------------------------------------------------------------- each step

    @property
    def is_idle(self) -> bool:
        """Whether nothing is moved, to be moved or to be told: as long as that is so, steps need none of what follows
        but `publish` and `age_stored`."""
        room = self.waiting_room
        is_moving = self._transfers.jobs or self._prefetches.waiting
        has_news = room.touched or room.may_have_effects
        return not (is_moving or has_news or (self._store.keeps_blocks and self._blocks.write_back))

    @property
    def waits_for_copies(self) -> bool:
        """Whether a transfer that begins before the next step may read or fill a block that the scheduler has just
        decided to copy: fetches of requests that it parked, writes to the store, prefetches."""
        may_write = self._store.keeps_blocks and bool(self._blocks.write_back or self._transfers.jobs)
        return may_write or bool(self._prefetches.waiting) or self.waiting_room.has_fetches

    @property
    def has_prefetches(self) -> bool:
        """Whether `go_on_prefetching` has something to go on with."""
        return bool(self._prefetches.waiting)

    def take_in(self, read_commands: Callable[[], None]) -> list[str]:
        """Takes in what transfers have brought. `read_commands` handles the front's messages: the end of a lease that
        came before a result makes that result worthless. Safe at any time between two calls, also in mid-step.

        Returns why the store did not take computed blocks, each reason once until another one or a success."""
        ended = list(self._transfers.poll())
        if ended:
            read_commands()
        news: defaultdict[str, _TransferNews] = defaultdict(_TransferNews)
        not_stored: list[str] = []
        for one in ended:
            if isinstance(one, WrittenBlock):
                not_stored += self._take_in_written(one)
                continue
            news[one.request_id].add(one.result, one.elapsed_s)
            if one.result.ref is not None and self._handoff_is_store:
                self._blocks.write_back.mark_stored([one.result.ref.block_hash])
        for request_id, item in news.items():
            self._report(request_id, item)
        self._write_back()
        return not_stored

    def give_up_overdue(self) -> None:
        """Counts transfers that hang as failed, if there are other blocks to compute in. Not in mid-step: blocks that
        become free then may still be written to by the step."""
        for request_id, overdue in self._transfers.overdue().items():
            fetched = [result for result in overdue.results if result.kind is TransferKind.FETCH]
            if not self.waiting_room.replace_blocks(request_id, [(one.index, one.block_id) for one in fetched]):
                continue
            news = _TransferNews()
            for result in overdue.results:
                self._transfers.give_up(result)
                news.add(result, overdue.elapsed_s)
            self._report(request_id, news)

    def write_back_from_host(self, carry_out: Callable[[list[BlockCopy]], None]) -> None:
        """Copies blocks up that only host memory has and the store lacks, and writes them, if no transfer is under way.
        Only while no step is under way, since it takes blocks."""
        if self._transfers.may_write:
            self._blocks.named.load_for_write_back(WRITE_TOKENS)
            if copies := self._blocks.take_copies():
                carry_out(copies)
            self._write_back()

    def age_stored(self, now: float) -> None:
        """To be called every `VERIFY_STORED_S` (`verify_at`): what the store took has to be verified when it is used
        next. What is retained counts as used."""
        self._blocks.write_back.age()
        self.verify_at = now + VERIFY_STORED_S
        if names := self._blocks.retention.names():
            self._store.touch(list(names))

    def prefetch(self, call_id: int, tenant: str, names: Sequence[bytes], now: float) -> None:
        """Brings these names up into the cache, a group at a time (`go_on_prefetching`); then one event answers."""
        self._prefetches.start(call_id, tenant, names, now)

    def go_on_prefetching(self, now: float, carry_out: Callable[[list[BlockCopy]], None], *, may_move: bool) -> bool:
        """Moves one group of blocks at most. Only while no step is under way, since it takes blocks. `may_move`: no
        request waits. Returns whether it could go on at once."""
        return self._prefetches.go_on(now, carry_out, may_move=may_move)

    def evict_stored(self, names: Sequence[bytes]) -> Eviction:
        """Has the store forget these names; a block that is being written, as soon as the write has ended. Prefetches
        that would bring one of them back end."""
        self._prefetches.evicted(names)
        self._evicted_late.update(filter(self._transfers.is_writing, names))
        return self._store.evict(names)

    def start(self) -> None:
        """Carries out the effects of requests that the scheduler parked."""
        effects = self.waiting_room.take_effects()
        for fetch in effects.store_fetches:
            self._transfers.fetch_stored(fetch.request_id, fetch.blocks)
        for ask in effects.asks:
            self._emit(m.RemotePrefillNeeded(ask.request_id, ask.first_block, ask.stop_block))
        for loan in effects.loans:
            self._emit(m.LoanNeeded(loan.request_id, loan.first, loan.stop))
        for request_id in effects.not_needed:
            self._emit(m.PrefillReceived(request_id, self._clock()))

    def publish(self, publishes: Sequence[Publish]) -> None:
        for publish in publishes:
            self._transfers.publish(publish.request.request_id, publish.blocks)

    def take_settled(self) -> list[Settled]:
        """Requests whose wait is over, for the scheduler."""
        settled = self.waiting_room.take_settled()
        for one in settled:
            if one.request.mode is m.RequestMode.REMOTE and not one.starts_again:
                self._emit(m.PrefillReceived(one.request.request_id, self._clock()))
        return settled

    # ------------------------------------------------------------------------------------------ internals

    def _report(self, request_id: str, news: _TransferNews) -> None:
        if request_id in self._prefetches:
            self._prefetches.ended(request_id, news.arrived, news.fetch_lost, news.failure)
            return
        if news.refs or news.published_lost:
            self._emit(m.BlocksPublished(request_id, news.refs, news.published_lost, news.failure, news.elapsed_s))
        if not (news.arrived or news.fetch_lost):
            return
        arrived, lost, failure = [], news.fetch_lost, news.failure
        self.waiting_room.lost(request_id, lost, failure)
        for index in news.arrived:
            if reason := self.waiting_room.arrived(request_id, index):
                lost, failure = [*lost, index], failure or reason
            else:
                arrived.append(index)
        self._emit(m.BlocksFetched(request_id, arrived, lost, failure, news.num_bytes, news.elapsed_s))

    def _write_back(self) -> None:
        """Brings computed blocks to the store, a run at a time, while no request's transfer is under way."""
        if self._transfers.may_write and (blocks := self._blocks.write_back.next_run(WRITE_TOKENS)):
            self._transfers.write(blocks)

    def _take_in_written(self, written: WrittenBlock) -> list[str]:
        """Returns the reason if the store did not take the block, unless it was the last one's, too."""
        is_stored = written.error is None
        self._blocks.write_back.end(written.block_hash, is_stored=is_stored, is_new=written.num_bytes > 0)
        if written.block_hash in self._evicted_late:
            self._evicted_late.remove(written.block_hash)
            self._store.evict([written.block_hash])
        before, self._write_failure = self._write_failure, written.error or ""
        return [] if written.error is None or written.error == before else [written.error]
