"""Decides what the next engine step computes. Pure: it returns effects, the engine carries them out.

There is no prefill phase and no decode phase. Each step gives every running request the tokens that it lacks, within
one token budget: decodes (one missing token) first, then prompts, in chunks, into what is left. When blocks run out
the request that was admitted last gives its blocks back.

One step, in order: `schedule` -> the engine carries out swaps, copies, the forward pass -> `update` with the sampled
tokens. Between steps: `add`, `release` and the events of remote KV.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.types import FinishReason, SampledToken
from engine.blocks.block_manager import BlockManager, HostCopy
from engine.messages import RequestMode
from engine.remote_kv.remote_prefill import RemotePrefill
from engine.remote_kv.shared_fetches import SharedFetches
from engine.request import Request, RequestStatus
from kv_store.base import BlockRef, FetchBlock, LocalBlock


@dataclass(slots=True, frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_size: int  # most tokens of one prompt in one step
    max_model_len: int
    eos_token_ids: frozenset[int]
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    announce: Literal["chunk", "end"] = "chunk"  # end: a prefill's blocks are published only when all are computed
    handoff_is_store: bool = False  # what a prefill publishes for its decode worker lies in the store


@dataclass(slots=True, frozen=True)
class Publish:
    """Blocks of a prefill that are computed and that its decode worker lacks."""

    request: Request
    blocks: list[LocalBlock]


@dataclass(slots=True, frozen=True)
class StoreFetch:
    """Blocks that the store held when the request came."""

    request: Request
    blocks: list[FetchBlock]


@dataclass(slots=True)
class SchedulerOutput:
    """What to do in this step. Carry out in the order of the fields."""

    host_copies: list[HostCopy] = field(default_factory=list)  # in this order, before anything is written
    publishes: list[Publish] = field(default_factory=list)  # blocks found in the prefix cache
    store_fetches: list[StoreFetch] = field(default_factory=list)
    num_tokens: dict[Request, int] = field(default_factory=dict)  # new tokens of each request in this step
    remote_needed: list[Request] = field(default_factory=list)  # ask a prefill worker for these prompts
    remote_not_needed: list[Request] = field(default_factory=list)  # the prefix cache had it: no prefill worker
    preempted: list[Request] = field(default_factory=list)
    names: set[bytes] = field(default_factory=set)  # of the full blocks that are computed in this step


@dataclass(slots=True, frozen=True)
class NewToken:
    request: Request
    token: SampledToken
    finish_reason: FinishReason | None


@dataclass(slots=True)
class StepResult:
    tokens: list[NewToken] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)


class Scheduler:
    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.requests: dict[str, Request] = {}  # every request that is not finished, or that is leased
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order of admission
        self._remote: dict[str, Request] = {}  # WAITING_FOR_REMOTE_KV
        self._fetches = SharedFetches(blocks, handoff_is_store=config.handoff_is_store)

    # ------------------------------------------------------------------------------------------- requests

    def add(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id} exists already")
        self.requests[request.request_id] = request
        self._waiting.append(request)

    def release(self, request_id: str) -> None:
        """Ends a request in whatever state, a lease included; blocks that a transfer still holds are free after it."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, RequestStatus.FINISHED_ABORTED)

    def stop(self, request_id: str) -> bool:
        """Ends a request, but for blocks that its decode worker may be reading: with those it is leased, until it is
        released, and this is True."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if not request.num_published_blocks:
            self._finish(request, RequestStatus.FINISHED_ABORTED)
            return False
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._offer(request)
            request.status = RequestStatus.FINISHED_LEASED
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something now or once blocks are free."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._remote)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_leases(self) -> int:
        return sum(request.status is RequestStatus.FINISHED_LEASED for request in self.requests.values())

    @property
    def num_queued_prompt_tokens(self) -> int:
        """Prompt tokens whose KV this engine still has to compute."""
        here = (*self._waiting, *self._running)
        return sum(max(request.num_prompt_tokens - request.num_computed_tokens, 0) for request in here)

    # ------------------------------------------------------------------------------------------- schedule

    def schedule(self, now: float) -> SchedulerOutput:
        """Fills one step's token budget."""
        output = SchedulerOutput()
        budget = self.config.max_num_batched_tokens
        for is_decode in (True, False):
            for request in list(self._running):
                if (request.num_missing_tokens == 1) is not is_decode or request in output.num_tokens:
                    continue
                budget -= self._schedule_running(request, budget, output)
        self._admit(budget, output, now)
        output.host_copies = self.blocks.take_copies()
        return output

    def chunk_size(self, request: Request, budget: int) -> int:
        """How many of the request's missing tokens go into this step."""
        return min(request.num_missing_tokens, self.config.chunk_size, budget)

    def _schedule_running(self, request: Request, budget: int, output: SchedulerOutput) -> int:
        """Schedules one running request, preempting others where blocks are missing; the tokens it got."""
        if request.status is not RequestStatus.RUNNING:
            return 0
        num_new = self.chunk_size(request, budget)
        if request.num_missing_tokens > 1 and self.blocks.enable_prefix_caching:
            self._adopt(request, output)
            num_new = self._up_to_known(request, self.chunk_size(request, budget), output)
        if num_new <= 0:
            return 0
        while not self.blocks.append(request, request.num_computed_tokens + num_new):
            victim = self._victim(request, output)
            if victim is None:
                return 0
            self._preempt(victim, output)
            if victim is request:
                return 0
        output.num_tokens[request] = num_new
        output.names.update(self._names(request, num_new))
        return num_new

    def _adopt(self, request: Request, output: SchedulerOutput) -> None:
        """Takes over what others have computed or fetched since the last step."""
        before = request.num_computed_tokens
        self.blocks.adopt_computed(request)
        if request.num_computed_tokens > before and (publish := self._publish(request)):
            output.publishes.append(publish)

    def _up_to_known(self, request: Request, num_new: int, output: SchedulerOutput) -> int:
        """`num_new`, less what is here already or is computed in this step by another request.

        0 where the very next block is: it costs nothing to take it over in the next step, and equal prompts that come
        together are computed once.
        """
        size = self.blocks.block_size
        start, last = request.num_computed_tokens, (request.num_tokens - 1) // size
        for index in range(start // size, min((start + num_new - 1) // size + 1, last)):
            name = request.block_hashes[index]
            if name in output.names or (index * size > start and self.blocks.find(name) is not None):
                return max(index * size - start, 0)
        return num_new

    def _names(self, request: Request, num_new: int) -> Sequence[bytes]:
        """Names of the blocks that the request's next `num_new` tokens complete."""
        if num_new == 1 or not self.blocks.enable_prefix_caching:
            return ()
        size, start = self.blocks.block_size, request.num_computed_tokens
        return request.block_hashes[start // size : (start + num_new) // size]

    def _victim(self, needy: Request, output: SchedulerOutput) -> Request | None:
        """Who gives its blocks back for `needy`: the last admitted that is not in this step already.

        A prefill is never pushed out: its decode worker may be reading its blocks, and it needs no more of them.
        """
        for request in reversed(self._running):
            if request.mode is not RequestMode.PREFILL and request not in output.num_tokens:
                return request
        return needy if needy in self._running and needy.mode is not RequestMode.PREFILL else None

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        self._running.remove(request)
        request.num_preemptions += 1
        if self.config.preemption_mode == "swap" and self.blocks.swap_out(request):
            request.status = RequestStatus.SWAPPED
        else:
            self.blocks.free(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
        self._waiting.appendleft(request)
        output.preempted.append(request)

    # ------------------------------------------------------------------------------------------ admission

    def _admit(self, budget: int, output: SchedulerOutput, now: float) -> None:
        """Takes requests from the queue's head while there is room; the first that does not fit stops it."""
        # What was just pushed out must not come back in the same step.
        while self._waiting and self.num_running < self.config.max_num_seqs and not output.preempted:
            request = self._waiting[0]
            is_remote = request.mode is RequestMode.REMOTE and request.status is RequestStatus.WAITING
            if budget <= 0 and not is_remote:
                return
            if request.status is RequestStatus.SWAPPED:
                if not self.blocks.swap_in(request):
                    return
            elif not self._allocate(request):
                return
            self._waiting.popleft()
            if request.scheduled_time is None:
                request.scheduled_time = now
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            if request.status is RequestStatus.WAITING and self._waits_for_kv(request, output):
                continue
            request.status = RequestStatus.RUNNING
            self._running.append(request)
            if publish := self._publish(request):
                output.publishes.append(publish)
            budget -= self._schedule_running(request, budget, output)

    def _allocate(self, request: Request) -> bool:
        """Blocks for all tokens known so far, the cached prefix shared; False where they are not there.

        All of them at once, so that a prefill can never run out of blocks half-way and a remote prompt's blocks are
        there to be fetched into.
        """
        num_found = self.blocks.find_prefix(request)
        num_promoted = self.blocks.counts.promoted
        if not self.blocks.allocate(request, request.num_tokens, num_found):
            return False
        request.num_computed_tokens = num_found * self.blocks.block_size
        if request.scheduled_time is None:
            num_from_host = self.blocks.counts.promoted - num_promoted
            self.blocks.counts.host_hits += num_from_host
            self.blocks.counts.device_hits += num_found - num_from_host
        return True

    def _waits_for_kv(self, request: Request, output: SchedulerOutput) -> bool:
        """Parks a newcomer whose KV comes from elsewhere: its beginning from the store, or with what other requests
        fetch already, the rest from a prefill worker.

        No worker is asked where all but the prompt's last block is cached, stored or on its way: computing those few
        tokens costs less than asking for them.
        """
        size = self.blocks.block_size
        num_blocks = self.blocks.blocks_for(request.num_prompt_tokens)
        first_block = request.num_computed_tokens // size
        limit = min(request.num_prompt_tokens // size, (request.num_tokens - 1) // size)
        stored = min(request.num_stored_blocks, limit)
        ask_from = max(stored, self._fetches.known_until(request, first_block, limit))
        asks_worker = request.mode is RequestMode.REMOTE and (ask_from == 0 or ask_from < num_blocks - 1)
        if not asks_worker and ask_from <= first_block:
            if request.mode is RequestMode.REMOTE:
                output.remote_not_needed.append(request)
            return False
        if asks_worker:
            output.remote_needed.append(request)
        request.remote = RemotePrefill(
            first_block,
            num_blocks if asks_worker else ask_from,
            ask_from,
            has_first_token=request.num_output_tokens > 0,
        )
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._remote[request.request_id] = request
        missing = self._fetches.join(request)
        if missing:
            refs = [BlockRef(index=index, block_hash=request.block_hashes[index]) for index in missing]
            wanted = [FetchBlock(ref, request.block_ids[ref.index]) for ref in request.remote.announce(refs)]
            output.store_fetches.append(StoreFetch(request, wanted))
        return True

    # ------------------------------------------------------------------------------------------ remote KV

    def announce(self, request_id: str, refs: Sequence[BlockRef]) -> list[FetchBlock]:
        """Blocks became readable at a prefill worker; which to fetch, and where to. Hold them while they move.

        A block under another name than this prompt's own is lost: a store would bring another prompt's bytes for it.
        """
        request = self._remote.get(request_id)
        if request is None or request.remote is None:
            return []
        remote = request.remote
        asked = [ref for ref in refs if remote.ask_from <= ref.index < remote.num_blocks]
        wrong = {ref.index for ref in asked if ref.block_hash != self.blocks.name_in_prompt(request, ref.index)}
        self.publications_lost(request_id, wrong, "the prefill worker announced a block of another prompt")
        right = [ref for ref in asked if ref.index not in wrong]
        return [FetchBlock(ref, request.block_ids[ref.index]) for ref in remote.announce(right)]

    def blocks_lost(self, request_id: str, indexes: Iterable[int], failure: str) -> None:
        remote = self._remote_of(request_id)
        for index in indexes:
            if not self._fetches.lost(request_id, index, failure) and remote is not None:
                remote.lose([index], failure)

    def publications_lost(self, request_id: str, indexes: Iterable[int], failure: str) -> None:
        """A prefill worker could not publish these. What is on its way already, as an earlier one announced it, or
        another request fetches it, may still arrive; it is lost when that fails."""
        remote = self._remote_of(request_id)
        if remote is not None:
            missing = set(range(remote.first_block, remote.num_blocks))
            missing -= remote.in_flight | remote.followed | remote.arrived
            self.blocks_lost(request_id, missing.intersection(indexes), failure)

    def replace_blocks(self, request_id: str, places: Sequence[tuple[int, int]]) -> bool:
        """Puts other blocks in the places, as (index, block), of those that the request fetched into and whose bytes
        may change at any time, whoever waits for them; False, and nothing done, where there are too few. Only between
        steps."""
        if len(places) > self.blocks.num_available_blocks:
            return False
        for index, block_id in places:
            request = self._fetches.leader_of(request_id, index) or self._remote.get(request_id)
            if request is not None and request.block_ids[index] == block_id:
                self.blocks.replace(request, index)
        return True

    def block_arrived(self, request_id: str, index: int) -> str:
        """Why the block is lost all the same: nobody can say which bytes arrived. Empty where it is here."""
        remote = self._remote_of(request_id)
        if remote is not None and (reason := remote.unleased.get(index)):
            self.blocks_lost(request_id, [index], reason)
            return reason
        if not self._fetches.arrived(request_id, index) and remote is not None:
            remote.arrive(index)
        return ""

    def take_touched(self) -> list[str]:
        """Ids of requests that may be settled now because of what was fetched for others."""
        return self._fetches.take_touched()

    def lease_ended(self, request_id: str, reason: str) -> None:
        """The prefill worker may reuse its blocks from now on. What a store gives is verified, whoever is gone."""
        if (remote := self._remote_of(request_id)) and not self.config.handoff_is_store:
            remote.end_lease(reason)

    def all_leases_ended(self, reason: str) -> None:
        for request_id in self._remote:
            self.lease_ended(request_id, reason)

    def remote_failed(self, request_id: str, failure: str) -> None:
        self.lease_ended(request_id, failure)
        if remote := self._remote_of(request_id):
            remote.end(failure)

    def first_token(self, request_id: str, token: SampledToken) -> NewToken | None:
        """The prompt's first token from a prefill worker; finishes the request where it is the last one too.

        None where the token is known already: the request continues one that an earlier worker began.
        """
        request = self._remote.get(request_id)
        if request is None or request.remote is None or request.remote.has_first_token:
            return None
        request.remote.has_first_token = True
        reason = request.append(token.token_id, self.config.eos_token_ids, self.config.max_model_len)
        self._finish_for(request, reason)
        return NewToken(request, token, reason)

    def settle_remote(self, request_id: str) -> tuple[Request, RemotePrefill] | None:
        """Lets the request run once nothing more is to be waited for, with how the wait went; None until then."""
        request = self._remote.get(request_id)
        if request is None or request.remote is None or not request.remote.is_settled:
            return None
        remote = request.remote
        self._fetches.end(request)
        del self._remote[request_id]
        request.remote = None
        if remote.is_let_down and not remote.asks_worker and request.mode is RequestMode.REMOTE:
            self._wait_again(request)
            return None
        if remote.asks_worker and not remote.is_complete:
            request.fallback_reason = remote.failure or "the prefill worker announced too few blocks"
        size = self.blocks.block_size
        num_ready = remote.num_ready_blocks
        # Without a first token the prompt's last token is computed again: only a computed token gives logits.
        request.num_computed_tokens = min(num_ready * size, request.num_prompt_tokens, request.num_tokens - 1)
        self.blocks.counts.store_hits += sum(index < remote.ask_from for index in remote.arrived)
        from_store = min(num_ready, remote.ask_from) * size
        request.num_cached_tokens = max(request.num_cached_tokens, min(from_store, request.num_prompt_tokens))
        self.blocks.name_computed(request)
        # Who computed the others writes them to the store.
        arrived = [index for index in remote.arrived if index < len(request.block_hashes)]
        self.blocks.mark_stored(request.block_hashes[index] for index in arrived)
        request.status = RequestStatus.RUNNING
        self._running.append(request)
        return request, remote

    def _wait_again(self, request: Request) -> None:
        """Whom the request followed left it alone, and it asked no prefill worker: it starts again, and may now."""
        self.blocks.free(request)
        request.num_computed_tokens = 0
        request.num_stored_blocks = 0
        request.status = RequestStatus.WAITING
        self._waiting.appendleft(request)

    def _remote_of(self, request_id: str) -> RemotePrefill | None:
        request = self._remote.get(request_id)
        return request.remote if request is not None else None

    # --------------------------------------------------------------------------------------------- update

    def update(self, output: SchedulerOutput, tokens: Sequence[SampledToken | None]) -> StepResult:
        """Takes in a step's results; `tokens` in the order of `output.num_tokens`, None for those that are not done."""
        result = StepResult()
        for (request, num_new), token in zip(output.num_tokens.items(), tokens, strict=True):
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted or failed meanwhile
            request.num_computed_tokens += num_new
            self.blocks.name_computed(request)
            if publish := self._publish(request):
                result.publishes.append(publish)
            if token is None:
                continue
            if num_new > 1:  # a prompt is done; others may need it long before the answer is
                self._offer(request)
            if request.mode is RequestMode.PREFILL:
                self._running.remove(request)
                request.status = RequestStatus.FINISHED_LEASED
                result.tokens.append(NewToken(request, token, None))
                continue
            reason = request.append(token.token_id, self.config.eos_token_ids, self.config.max_model_len)
            self._finish_for(request, reason)
            result.tokens.append(NewToken(request, token, reason))
        return result

    def _publish(self, request: Request) -> Publish | None:
        """The blocks of a prefill that became complete since the last call, its partial tail with the last chunk."""
        if request.mode is not RequestMode.PREFILL:
            return None
        size = self.blocks.block_size
        is_done = request.num_computed_tokens >= request.num_prompt_tokens
        if self.config.announce == "end" and not is_done:
            return None
        stop = self.blocks.blocks_for(request.num_prompt_tokens) if is_done else request.num_computed_tokens // size
        start = max(request.num_published_blocks, request.first_block)
        if start >= stop:
            return None
        self.blocks.name_full_blocks(request)
        request.num_published_blocks = stop
        num_full = request.num_prompt_tokens // size
        return Publish(
            request,
            [
                LocalBlock(
                    index,
                    request.block_ids[index],
                    request.block_hashes[index] if index < num_full else self.blocks.tail_hash(request),
                    is_partial=index >= num_full,
                )
                for index in range(start, stop)
            ],
        )

    def _finish_for(self, request: Request, reason: FinishReason | None) -> None:
        if reason is FinishReason.STOP:
            self._finish(request, RequestStatus.FINISHED_STOPPED)
        elif reason is FinishReason.LENGTH:
            self._finish(request, RequestStatus.FINISHED_LENGTH)

    def _offer(self, request: Request) -> None:
        """What a request computed goes to the store, unless its handoff has brought it there."""
        if request.mode is not RequestMode.PREFILL or not self.config.handoff_is_store:
            self.blocks.offer(request)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        self._fetches.end(request)
        request.remote = None
        if request in self._running:
            self._running.remove(request)
        elif request.request_id in self._remote:
            del self._remote[request.request_id]
        elif request in self._waiting:
            self._waiting.remove(request)
        self._offer(request)
        request.status = status
        self.blocks.free(request)
        del self.requests[request.request_id]

    # ------------------------------------------------------------------------------------------ integrity

    def check_integrity(self) -> list[str]:
        """What is wrong with blocks or queues; empty where every block is free, cached or owned by a live request."""
        problems = self.blocks.check_integrity(self.requests.values())
        places = [*self._waiting, *self._running, *self._remote.values()]
        num_places = Counter(map(id, places))
        for request in self.requests.values():
            wanted = 0 if request.status is RequestStatus.FINISHED_LEASED else 1
            if num_places[id(request)] != wanted:
                found = num_places[id(request)]
                problems.append(f"request {request.request_id} ({request.status}) is in {found} queues")
            if request.status is RequestStatus.WAITING and request.block_ids:
                problems.append(f"request {request.request_id} waits with blocks")
        problems.extend(self._fetches.problems(self.requests))
        known = {id(request) for request in self.requests.values()}
        problems.extend(
            f"request {request.request_id} is in a queue, but unknown" for request in places if id(request) not in known
        )
        return problems
