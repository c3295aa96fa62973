"""The scheduler parks a request here whose KV comes from elsewhere, and gets it back when nothing more is to come.

Pure: events come in, effects come out (`take_effects`), and requests whose wait is over (`take_settled`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.prefill_place import is_computed_in_place
from engine.blocks.block_manager import BlockManager
from engine.messages import RequestMode
from engine.remote_kv.kv_wait import BlockState, KVWait, Parked
from engine.remote_kv.shared_fetches import SharedFetches
from engine.request import Request, RequestStatus
from kv_store.base import BlockRef, FetchBlock, LocalBlock


@dataclass(slots=True, frozen=True)
class StoreFetch:
    """Blocks that the store held when the request came."""

    request_id: str
    blocks: list[FetchBlock]


@dataclass(slots=True, frozen=True)
class AskPrefill:
    """A prefill worker has to compute the request's prompt, and hand over the blocks from `first_block` on; with a
    `stop_block` only those before it, and no token."""

    request_id: str
    first_block: int
    stop_block: int = 0


@dataclass(slots=True, frozen=True)
class AskLoan:
    """The decode worker of a prefill has to lend the blocks [first, stop) of the prompt."""

    request_id: str
    first: int
    stop: int


@dataclass(slots=True)
class Effects:
    """What the caller has to do for requests that were parked, or that need not be parked."""

    store_fetches: list[StoreFetch] = field(default_factory=list)
    asks: list[AskPrefill] = field(default_factory=list)
    loans: list[AskLoan] = field(default_factory=list)
    not_needed: list[str] = field(default_factory=list)  # ids of remote requests that ask no prefill worker


@dataclass(slots=True, frozen=True)
class Settled:
    """A request whose wait is over. It is RUNNING; or WAITING, without blocks, if it has to start again."""

    request: Request
    lost_reason: str  # why blocks that the store or another worker had are computed here; empty if all came
    num_not_lent: int = 0  # blocks that a decode worker was to lend, and that did not arrive

    @property
    def starts_again(self) -> bool:
        return self.request.status is RequestStatus.WAITING


class WaitingRoom:
    def __init__(self, blocks: BlockManager, *, handoff_is_store: bool = False) -> None:
        """`handoff_is_store`: what a prefill worker publishes lies in a store."""
        self._blocks = blocks
        self._handoff_is_store = handoff_is_store
        self._parked: dict[str, Parked] = {}  # by request id
        self._fetches = SharedFetches(blocks, handoff_is_store=handoff_is_store)
        self.touched: dict[str, None] = {}  # ids of requests whose wait may be over
        self._effects = Effects()
        self.may_have_effects = False  # since `take_effects`

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        return (one.request for one in self._parked.values())

    # ------------------------------------------------------------------------------------ for the scheduler

    def park(self, request: Request) -> bool:
        """Parks a newcomer, which has all its blocks, if its KV comes from elsewhere: the beginning from the store or
        with what other requests fetch already, the rest from a prefill worker. A prefill asks its decode worker for
        what that has beyond the beginning. Returns False if there is nothing to wait for.

        No worker is asked if so few tokens are neither cached, stored nor on their way that computing them here is
        better (`common.prefill_place`). Of a split prompt it is asked for whole blocks alone.
        """
        self.may_have_effects = True
        num_blocks, is_split = self._asked_blocks(request)
        first_block = request.num_computed_tokens // self._blocks.block_size
        stored, limit = self._stored_and_limit(request)
        if request.needs_every_token:
            limit = first_block
        ask_from = max(stored, self._fetches.known_until(request, first_block, limit))
        asks_worker = self._asks_worker(request, ask_from)
        known_until = max(ask_from, min(request.num_lendable_blocks, limit))
        if not asks_worker and known_until <= first_block:
            if request.mode is RequestMode.REMOTE:
                self._effects.not_needed.append(request.request_id)
            return False
        wait = KVWait(
            first_block,
            num_blocks if asks_worker else known_until,
            ask_from,
            has_first_token=request.num_output_tokens > 0 or not asks_worker or is_split,
        )
        parked = self._parked[request.request_id] = Parked(request, wait)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        if asks_worker:
            self._effects.asks.append(AskPrefill(request.request_id, ask_from, num_blocks if is_split else 0))
        elif known_until > ask_from:
            self._effects.loans.append(AskLoan(request.request_id, ask_from, known_until))
        if missing := self._fetches.join(parked):
            wait.fetch_stored(missing)
            refs = [BlockRef(index=index, block_hash=request.block_hashes[index]) for index in missing]
            self._effects.store_fetches.append(StoreFetch(request.request_id, _into(request, refs)))
        return True

    def follows_only(self, request: Request) -> bool:
        """Whether the next block that a newcomer lacks is on its way for another request, and `park` would have nothing
        fetched or asked for in its name."""
        if not self._fetches:
            return False
        first_block = self._blocks.find_prefix(request)
        stored, limit = self._stored_and_limit(request)
        known = self._fetches.known_until(request, first_block, limit)
        return known > first_block and known >= stored and not self._asks_worker(request, known)

    def _stored_and_limit(self, request: Request) -> tuple[int, int]:
        """(leading blocks that the store held, how many at most need not be computed)."""
        size = self._blocks.block_size
        limit = min(request.num_prompt_tokens // size, (request.num_tokens - 1) // size)
        return min(request.num_stored_blocks, limit), limit

    def _asked_blocks(self, request: Request) -> tuple[int, bool]:
        """(leading blocks of the prompt that a prefill worker may be asked for, whether the rest is computed here)."""
        if request.num_remote_tokens < request.num_prompt_tokens:
            return request.num_remote_tokens // self._blocks.block_size, True
        return self._blocks.blocks_for(request.num_prompt_tokens), False

    def _asks_worker(self, request: Request, ask_from: int) -> bool:
        """Whether a prefill worker has to compute the request's KV from block `ask_from` on: it is neither here nor on
        its way."""
        size = self._blocks.block_size
        num_blocks, is_split = self._asked_blocks(request)
        num_missing = (num_blocks * size if is_split else request.num_prompt_tokens) - ask_from * size
        in_place = is_computed_in_place(num_missing, request.min_remote_tokens, size)
        return request.mode is RequestMode.REMOTE and not in_place

    def lendable(self, request_id: str, first: int, stop: int) -> list[LocalBlock]:
        """Which of the full blocks [first, stop) of a parked request's prompt are here."""
        parked = self._parked.get(request_id)
        if parked is None:
            return []
        request, wait = parked.request, parked.wait
        stop = min(stop, wait.num_blocks, request.num_prompt_tokens // self._blocks.block_size)
        return [
            LocalBlock(index, request.block_ids[index], self._blocks.cache.name_in_prompt(request, index))
            for index in range(first, stop)
            if index < wait.first_block or wait.state(index) is BlockState.ARRIVED
        ]

    def leave(self, request: Request) -> None:
        """The request has ended, parked or not. Call before it gives its blocks up."""
        if parked := self._parked.pop(request.request_id, None):
            self._touch(self._fetches.leave(parked))

    def check_integrity(self, requests: Mapping[str, Request]) -> list[str]:
        """What is wrong, given all live requests; empty if nothing is."""
        return [
            *(
                f"request {request_id} is parked, but unknown"
                for request_id, parked in self._parked.items()
                if requests.get(request_id) is not parked.request
            ),
            *self._fetches.check_integrity(self._parked),
        ]

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._parked

    # ---------------------------------------------------------------------------------------------- events

    def published(self, request_id: str, refs: Sequence[BlockRef]) -> list[FetchBlock]:
        """Blocks became readable at another worker. Returns which to fetch, and whereto; hold them meanwhile.

        A block under another name than this prompt's own is lost: a store would bring another prompt's bytes for it.
        """
        parked = self._touched_one(request_id)
        if parked is None:
            return []
        request, wait, name_of = parked.request, parked.wait, self._blocks.cache.name_in_prompt
        asked = [ref for ref in refs if wait.ask_from <= ref.index < wait.num_blocks]
        wrong = {ref.index for ref in asked if ref.block_hash != name_of(request, ref.index)}
        self.not_published(request_id, wrong, "a block of another prompt was published for it")
        return _into(request, wait.published([ref for ref in asked if ref.index not in wrong]))

    def not_published(self, request_id: str, indexes: Iterable[int], failure: str) -> None:
        """Another worker could not publish these."""
        if parked := self._touched_one(request_id):
            self.lost(request_id, parked.wait.unpublished(indexes), failure)

    def arrived(self, request_id: str, index: int) -> str:
        """A fetch that `request_id` began went well. Returns why the block is lost nevertheless, or nothing."""
        parked = self._touched_one(request_id)
        if parked and parked.wait.state(index) is BlockState.UNLEASED:
            reason = parked.wait.lease_failure or "its lease had ended"
            self.lost(request_id, [index], reason)
            return reason
        if waiting := self._fetches.arrived(request_id, index):
            self._touch(waiting)
        elif parked:
            parked.wait.arrive(index)
        return ""

    def lost(self, request_id: str, indexes: Iterable[int], failure: str) -> None:
        """Fetches that `request_id` began failed."""
        parked = self._touched_one(request_id)
        for index in indexes:
            if waiting := self._fetches.lost(request_id, index, failure):
                self._touch(waiting)
            elif parked:
                parked.wait.lose([index], failure)

    def replace_blocks(self, request_id: str, places: Sequence[tuple[int, int]]) -> bool:
        """Puts other blocks in the places (index, block) that `request_id` began to fetch into and whose bytes may
        change at any time, whichever request waits for them. Returns False and changes nothing if there are too few
        blocks. Only between steps."""
        if len(places) > self._blocks.num_available_blocks:
            return False
        for index, block_id in places:
            request = self._fetches.leader_of(request_id, index)
            if request is None and request_id in self._parked:
                request = self._parked[request_id].request
            if request is not None and request.block_ids[index] == block_id:
                self._blocks.replace(request, index)
        return True

    def lease_ended(self, request_id: str, reason: str) -> None:
        """The prefill worker may reuse its blocks from now on. Blocks from a store are verified, and need no lease."""
        if (parked := self._parked.get(request_id)) and not self._handoff_is_store:
            parked.wait.end_lease(reason)

    def all_leases_ended(self, reason: str) -> None:
        for request_id in self._parked:
            self.lease_ended(request_id, reason)

    def failed(self, request_id: str, failure: str) -> None:
        """No prefill worker brings anything more."""
        self.lease_ended(request_id, failure)
        if parked := self._touched_one(request_id):
            parked.wait.end(failure)

    def first_token(self, request_id: str) -> Request | None:
        """The prompt's first token is known. Returns the request that it is appended to; None if the request does
        not wait, or if the token is known already: the request continues an answer that an earlier worker began."""
        parked = self._touched_one(request_id)
        if parked is None or parked.wait.has_first_token:
            return None
        parked.wait.has_first_token = True
        return parked.request

    # --------------------------------------------------------------------------------------------- effects

    @property
    def has_fetches(self) -> bool:
        """Whether `take_effects` has fetches from the store."""
        return bool(self._effects.store_fetches)

    def take_effects(self) -> Effects:
        """What the caller has to do, since the last call."""
        effects, self._effects, self.may_have_effects = self._effects, Effects(), False
        return effects

    def take_settled(self) -> list[Settled]:
        """Requests whose wait is over since the last call. They are parked no more."""
        settled = []
        while self.touched:
            del self.touched[request_id := next(iter(self.touched))]
            parked = self._parked.get(request_id)
            if parked and parked.wait.is_settled:
                del self._parked[request_id]
                self._touch(self._fetches.leave(parked))
                settled.append(self._settle(parked))
        return settled

    def _settle(self, parked: Parked) -> Settled:
        request, wait = parked.request, parked.wait
        if wait.is_let_down and not wait.asks_worker and request.mode is RequestMode.REMOTE:
            # The request it followed has ended and no prefill worker was asked, so it goes back to the queue.
            self._blocks.free(request)
            request.num_computed_tokens = 0
            request.num_stored_blocks = 0
            request.status = RequestStatus.WAITING
            return Settled(request, "")
        is_remote = request.mode is RequestMode.REMOTE
        if is_remote and wait.asks_worker and not wait.is_complete:
            request.fallback_reason = wait.failure or "the prefill worker published too few blocks"
        size = self._blocks.block_size
        num_ready = wait.num_ready_blocks
        arrived = wait.indexes(BlockState.ARRIVED)
        # Without a first token the prompt's last token is computed again: only a computed token gives logits.
        request.num_computed_tokens = min(num_ready * size, request.num_prompt_tokens, request.num_tokens - 1)
        num_stored = sum(index < wait.ask_from for index in arrived)
        num_lent = 0 if is_remote else len(arrived) - num_stored
        self._blocks.counts.store_hits += num_stored
        self._blocks.counts.lent_hits += num_lent
        # What a prefill worker brings was computed for this request; what a decode worker lends was not.
        num_found = min(num_ready, wait.ask_from) if is_remote else num_ready
        request.num_cached_tokens = max(request.num_cached_tokens, min(num_found * size, request.num_prompt_tokens))
        num_not_lent = 0 if is_remote else wait.num_blocks - wait.ask_from - num_lent
        self._blocks.name_computed(request)
        # The worker that computed the others writes them to the store.
        names = [request.block_hashes[index] for index in arrived if index < len(request.block_hashes)]
        self._blocks.write_back.mark_stored(names)
        request.status = RequestStatus.RUNNING
        return Settled(request, wait.failure if wait.count(BlockState.LOST) else "", num_not_lent)

    def _touched_one(self, request_id: str) -> Parked | None:
        parked = self._parked.get(request_id)
        if parked is not None:
            self._touch([parked])
        return parked

    def _touch(self, waiting: Iterable[Parked]) -> None:
        self.touched.update((parked.request.request_id, None) for parked in waiting)


def _into(request: Request, refs: Sequence[BlockRef]) -> list[FetchBlock]:
    """The fetches of these blocks, into the request's own blocks."""
    return [FetchBlock(ref, request.block_ids[ref.index]) for ref in refs]
