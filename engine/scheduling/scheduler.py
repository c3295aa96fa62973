"""Decides what the next engine step computes. Pure: it returns effects, the engine carries them out.

There is no prefill phase and no decode phase. Each step gives every running request the tokens that it lacks, within
one token budget: decodes (one missing token) first, then prompts, in chunks, into what is left. If blocks run out, the
request that was admitted last gives its blocks back. A request whose KV comes from elsewhere is parked in the
`WaitingRoom`, and `take_back` brings it back.

With the policy `slo` and a model of time, a step is bounded by time, too, and its order is that of slack
(`engine.scheduling.slack`). Without a model that policy is `priority`. `auto` is `fcfs`, and by slack as long as a
request with latency targets is here and there is a model of time.

A step may check tokens beyond those that it has to compute (`engine.speculation`). They get what the decodes left of
the budget, and no request is preempted for them.

One step, in order: `schedule` -> the engine carries out copies and the forward pass -> `update` with sampled tokens.
`schedule_ahead` may decide the next step before that `update`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

from common.batch_time import BatchTime, StepShape
from common.types import SLACKS_S, FinishReason, SampledToken
from engine.blocks.block_manager import BlockManager
from engine.integrity import problems
from engine.messages import RequestMode
from engine.remote_kv import Publish, WaitingRoom, next_publication
from engine.request import Request, RequestStatus
from engine.scheduling.ahead import ends_next, may_go_ahead
from engine.scheduling.decode_sums import DecodeSums
from engine.scheduling.equal_prompts import EqualPrompts
from engine.scheduling.preemption import victim
from engine.scheduling.room import Room
from engine.scheduling.schedule import NewToken, SchedulerConfig, SchedulerOutput, StepResult
from engine.scheduling.slack import SlackPolicy
from engine.scheduling.step_budget import StepBudget
from engine.scheduling.waiting_queue import SlackQueue, WaitingQueue


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        room: WaitingRoom,
        batch_time: Callable[[], BatchTime | None] = lambda: None,
    ) -> None:
        """`batch_time`: how long a step takes, if that is known well enough to decide by it."""
        self.config = config
        self.blocks = blocks
        self.requests: dict[str, Request] = {}  # every request that is not finished, or that is leased
        self._waiting_room = room  # parked: WAITING_FOR_REMOTE_KV
        self._equal_prompts = EqualPrompts(blocks, room)
        self.slack: SlackPolicy | None = None  # while it orders requests, if it knows how long steps take
        self._slack_at_rest: SlackPolicy | None = None  # of `auto`, while it does not
        self._with_targets: set[Request] = set()  # of `auto`: those that are not finished
        self._parts: list[Request] = []  # of prompts, that may still wait
        self._waiting: WaitingQueue
        if config.queue_policy == "slo":
            self.slack = SlackPolicy(config, blocks, batch_time)
            self._waiting = SlackQueue(self._equal_prompts)
        elif config.queue_policy == "auto":
            self._slack_at_rest = SlackPolicy(config, blocks, batch_time)
            self._waiting = WaitingQueue("fcfs", self._equal_prompts)
        else:
            self._waiting = WaitingQueue(config.queue_policy, self._equal_prompts)
        self._running: list[Request] = []  # in the order of admission
        self._sums = DecodeSums()  # of those that decode
        self._room = Room(blocks.block_size)

    # ------------------------------------------------------------------------------------------- requests

    def add(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id} exists already")
        self.requests[request.request_id] = request
        if request.targets is not None and self.config.queue_policy == "auto":
            self._with_targets.add(request)
        if request.is_part:
            self._parts.append(request)
        if self.slack is not None:
            self.slack.enter(request)
        self._waiting.add(request)

    def take_back(self, request: Request) -> None:
        """Takes a parked request back: it goes on with the KV that came, or starts again."""
        if request.status is RequestStatus.WAITING:
            self._put_first(request)
        else:
            self._running.append(request)
            self._sums.note(request)
            if self.slack is not None:
                self.slack.taken_back(request)

    def release(self, request_id: str) -> None:
        """Ends a request in any state, also a leased one. Blocks that a transfer holds become free when the transfer
        ends."""
        if (request := self.requests.get(request_id)) is not None:
            self._finish(request, RequestStatus.FINISHED_ABORTED)

    def stop(self, request_id: str) -> None:
        """Computes no more of a request. If blocks of it were published, its decode worker may be reading them, so it
        is leased until `release`; else it has ended."""
        if (request := self.requests.get(request_id)) is None:
            return
        if not request.num_published_blocks:
            self._finish(request, RequestStatus.FINISHED_ABORTED)
        elif request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._offer(request)
            request.status = RequestStatus.FINISHED_LEASED
            self._sums.note(request)
            self._with_targets.discard(request)

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something now or once blocks are free."""
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._waiting_room)

    @property
    def num_computing(self) -> int:
        """Of these, requests that wait for nobody's KV: steps compute them."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held_back(self) -> int:
        """How many of `num_waiting` wait for the KV of a request that runs: there is room for them."""
        return self._waiting.num_held_back

    @property
    def goes_by_slack(self) -> bool:
        """Whether the order is that of slack."""
        if self.slack is None or not self.slack.knows_times:
            return False
        return self.config.queue_policy == "slo" or bool(self._with_targets)

    @property
    def num_leases(self) -> int:
        return sum(request.status is RequestStatus.FINISHED_LEASED for request in self.requests.values())

    @property
    def queued_prompts(self) -> tuple[int, int]:
        """(prompts, their tokens) whose KV this engine still has to compute."""
        num_prompts = num_tokens = 0
        for request in (*self._waiting, *self._running):
            if (num_left := request.num_prompt_tokens - request.num_computed_tokens) > 0:
                num_prompts += 1
                num_tokens += num_left
        return num_prompts, num_tokens

    def queued_by_slack(self, now: float) -> tuple[int, ...]:
        """See `WorkerLoad`."""
        slack = self.slack or self._slack_at_rest
        if slack is None or not slack.would_know_times:
            return ()
        if slack is self._slack_at_rest or not slack.knows_times:  # it will with the next step
            return (0,) * len(SLACKS_S)
        num_tokens = [0] * (len(SLACKS_S) + 1)
        for request in (*self._waiting, *self._running):
            pace, num_left = request.pace, request.num_prompt_tokens - request.num_computed_tokens
            if num_left > 0 and pace is not None and pace.has_target:
                num_tokens[bisect_left(SLACKS_S, pace.start_by - now)] += num_left
        return tuple(accumulate(num_tokens[:-1]))

    @property
    def room_after(self) -> tuple[int, ...]:
        """See `WorkerLoad`."""
        if self.num_running < self.config.max_num_seqs:
            head = next(iter(self._waiting), None)
            if head is None or self.blocks.blocks_for(head.num_tokens) <= self.blocks.num_available_blocks:
                return ()
        if self.slack is not None and self.slack.knows_times and self.slack.displaced(self._running) is not None:
            return ()  # for a newcomer with targets
        return self._room.after((*self._running, *self._waiting_room), self._waiting.num_before_newcomer)

    @property
    def running(self) -> Sequence[Request]:
        """Those that steps compute. Valid until the next call of anything here."""
        return self._running

    @property
    def decodes(self) -> list[Request]:
        """Requests that lack no more KV than that of their last token."""
        return [one for one in self._running if one.num_missing_tokens == 1 and one.num_output_tokens]

    @property
    def decode_shape(self) -> StepShape:
        """The sums of the next step, but for prompts: of all requests that lack the KV of their last token alone."""
        return self._sums.shape

    # ------------------------------------------------------------------------------------------- schedule

    def schedule(self, now: float, drafts: Mapping[Request, Sequence[int]] = MappingProxyType({})) -> SchedulerOutput:
        """Fills one step's token budget. `drafts`: tokens that may follow, of some of `decodes`."""
        output = SchedulerOutput()
        if self._parts:
            self._hand_over_cached(output, now)
        if self.slack is not None or self._with_targets:
            self._choose_order(now)
        if self.slack is not None and self._takes_times(self.slack, now):
            self._schedule_by_slack(self.slack, output, now, drafts)
        else:
            self._schedule_in_turn(output, now, drafts)
        output.host_copies = self.blocks.take_copies()
        return output

    def _schedule_in_turn(self, output: SchedulerOutput, now: float, drafts: Mapping[Request, Sequence[int]]) -> None:
        """Decodes, then prompts, then newcomers."""
        budget = StepBudget(self.config.max_num_batched_tokens, self.config.chunk_size)
        decodes, prompts = self._decodes_and_prompts()
        for request in decodes:
            self._schedule_running(request, budget, output)
        if drafts:
            self._schedule_drafts(drafts, budget, output)
        for request in prompts:
            self._schedule_running(request, budget, output)
        if self._waiting:
            self._admit(budget, output, now)

    def schedule_ahead(self, under_way: SchedulerOutput) -> SchedulerOutput:
        """The step after one that has not ended, if it is certain by now: a decode of each request that goes on. Empty
        if anybody would be computed later than if it were decided after that end. A request whose token turns out to
        end it is dropped when the results are taken in (`update`).

        Admits and preempts nobody, and changes nothing if it is empty.
        """
        output = SchedulerOutput()
        if self.goes_by_slack or (self._waiting and self.num_running < self.config.max_num_seqs):
            return output
        going_on = []
        for request in self._running:
            if not request.num_pending or not may_go_ahead(request):
                return output
            if not ends_next(request, self.config.max_model_len):
                going_on.append(request)
            elif self._waiting:
                return output  # its place is for one that waits
        num_blocks = sum(self.blocks.num_lacking(one, one.num_tokens + 1) for one in going_on)
        if len(going_on) > self.config.max_num_batched_tokens or num_blocks > self.blocks.num_available_blocks:
            return output
        for request in going_on:
            self.blocks.append(request, request.num_tokens + 1)
            output.num_tokens[request] = 1
            output.after[request] = under_way.num_tokens[request]
        output.host_copies = self.blocks.take_copies()
        return output

    def _decodes_and_prompts(self) -> tuple[list[Request], list[Request]]:
        """Those that run, by whether they lack one token or more."""
        decodes: list[Request] = []
        prompts: list[Request] = []
        for one in self._running:
            (decodes if one.num_missing_tokens == 1 else prompts).append(one)
        return decodes, prompts

    def _schedule_running(self, request: Request, budget: StepBudget, output: SchedulerOutput) -> None:
        """Schedules one running request, preempting others if blocks run out."""
        if request.status is not RequestStatus.RUNNING or request.num_pending:
            return  # preempted in this step, or its next token is not known before the step on the device ends
        num_new = budget.chunk(request.num_missing_tokens, request.num_computed_tokens)
        if request.num_missing_tokens > 1 and self.blocks.cache.is_enabled and not request.needs_every_token:
            num_new = self._unknown_chunk(request, budget, output)
        stop = request.num_computed_tokens + num_new
        if num_new <= 0 or not (self.blocks.append(request, stop) or self._make_blocks(request, stop, output)):
            return
        budget.take(num_new, request.num_computed_tokens)
        output.num_tokens[request] = num_new
        if num_new > 1:
            output.names.update(self._equal_prompts.names(request, num_new))

    def _unknown_chunk(self, request: Request, budget: StepBudget, output: SchedulerOutput) -> int:
        """How many tokens of a prompt this step takes, once what others have computed by now is taken over."""
        before = request.num_computed_tokens
        self.blocks.adopt_computed(request)
        self._sums.note(request)
        output.publishes += self._publish(request) if request.num_computed_tokens > before else []
        most = budget.chunk(request.num_missing_tokens, request.num_computed_tokens)
        return self._equal_prompts.up_to_known(request, most, output.names)

    def _make_blocks(self, request: Request, num_tokens: int, output: SchedulerOutput) -> bool:
        """Preempts others, or the request itself, until it has blocks for so many tokens. False if it gets none."""
        policy = self.config.queue_policy if self.slack is None else "slo"
        while (other := victim(request, self._running, output.num_tokens, policy)) is not None:
            self._preempt(other, output)
            if other is request:
                return False
            if self.blocks.append(request, num_tokens):
                return True
        return False

    def _schedule_drafts(
        self, drafts: Mapping[Request, Sequence[int]], budget: StepBudget, output: SchedulerOutput
    ) -> None:
        """Adds drafts to requests of this step, as far as budget and blocks suffice."""
        for request, draft in drafts.items():
            kept = list(draft[: budget.fitting(len(draft))])
            if kept and request in output.num_tokens and self.blocks.append(request, request.num_tokens + len(kept)):
                output.drafts[request] = kept
                budget.take_drafted(len(kept))

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        self._running.remove(request)
        request.num_preemptions += 1
        if self.config.preemption_mode == "swap" and self.blocks.swap_out(request):
            request.status = RequestStatus.SWAPPED
        else:
            self.blocks.free(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
        self._sums.note(request)
        self._put_first(request)
        output.preempted.append(request)

    def _put_first(self, request: Request) -> None:
        if self.slack is not None:
            self.slack.forget(request)
            self.slack.enter(request)
        self._waiting.put_first(request)

    # ------------------------------------------------------------------------------------------- by slack

    def _choose_order(self, now: float) -> None:
        """With `auto`: by slack once a request with targets is here and it is known how long steps take, until no such
        request is left."""
        if self._slack_at_rest is None:
            if self.slack is not None and self.config.queue_policy == "auto" and not self._with_targets:
                self._go_by_arrival(self.slack)
        elif self._with_targets:
            self._slack_at_rest.begin(now)
            if self._slack_at_rest.knows_times:
                self._go_by_slack(self._slack_at_rest)

    def _go_by_slack(self, slack: SlackPolicy) -> None:
        self.slack, self._slack_at_rest = slack, None
        queue = SlackQueue(self._equal_prompts)
        for request in self._waiting:
            slack.enter(request)
            queue.add(request)
        queue.num_held_back = self._waiting.num_held_back
        self._waiting = queue

    def _go_by_arrival(self, slack: SlackPolicy) -> None:
        """All is as if it had always been so: who had begun is first, and then each in the order in which it came."""
        self.slack, self._slack_at_rest = None, slack
        slack.rest()
        queue = WaitingQueue("fcfs", self._equal_prompts)
        for request in self.requests.values():
            request.pace = None
        waiting = [one for one in self.requests.values() if one in self._waiting]
        for request in sorted(waiting, key=lambda one: one.scheduled_time is None):
            queue.add(request)
        queue.num_held_back = self._waiting.num_held_back
        self._waiting = queue

    def _takes_times(self, slack: SlackPolicy, now: float) -> bool:
        """Begins a step by slack. False if nobody knows how long steps take."""
        if slack.begin(now):
            for request in list(self._waiting):
                slack.enter(request)
                self._queue_by_slack.move(request)
        return slack.knows_times

    @property
    def _queue_by_slack(self) -> SlackQueue:
        if not isinstance(self._waiting, SlackQueue):
            raise TypeError("requests do not wait by slack")
        return self._waiting

    def _schedule_by_slack(
        self, slack: SlackPolicy, output: SchedulerOutput, now: float, drafts: Mapping[Request, Sequence[int]]
    ) -> None:
        """Decodes, then prompts in one order with those that wait, into the time that is left."""
        queue = self._queue_by_slack
        self._drop_late(slack, output, now)
        self._make_room(slack, output, now)
        decodes, others = self._decodes_and_prompts()
        has_blocks = self.blocks.num_available_blocks >= len(decodes)
        chosen, budget = slack.plan(decodes, self._sums.shape, now, has_blocks=has_blocks)
        for request in chosen:
            self._schedule_running(request, budget, output)
        self._schedule_drafts(drafts, budget, output)
        prompts = deque(slack.order(others, now)) if others else deque()
        if self._waiting:
            slack.look_ahead(self._running, self._waiting_room, now)
        can_admit = True
        overdue = slack.share_of_late(prompts, queue, now)
        if overdue is not None and not (overdue in queue and self._is_held_back(overdue)):
            within = budget.within
            budget.within = max(within, budget.seconds + slack.chunk_p90(overdue))
            if overdue in queue:
                # If there is no room for it, nobody else takes what becomes free.
                can_admit = self._admit_one(overdue, budget, output, now, is_overdue=True)
            else:
                self._schedule_running(overdue, budget, output)
            budget.within = within
        newcomer = self._first_by_slack(slack, output, now) if can_admit else None
        while prompts or newcomer is not None:
            if newcomer is None or (prompts and slack.goes_before(prompts[0], newcomer)):
                request = prompts.popleft()
                if request not in output.num_tokens:
                    self._schedule_running(request, budget, output)
            elif self._admit_one(newcomer, budget, output, now):
                request, newcomer = newcomer, self._first_by_slack(slack, output, now)
            else:
                newcomer = None
                continue
            if request in output.num_tokens:
                slack.bound(request, budget, now)
        slack.decided(output.num_tokens, budget, now)

    def _is_held_back(self, request: Request) -> bool:
        return self._equal_prompts.is_held_back(request, self._equal_prompts.next_blocks(self._running))

    def _make_room(self, slack: SlackPolicy, output: SchedulerOutput, now: float) -> None:
        """Preempts one request of best effort if the most urgent one that waits has no place or too few blocks."""
        head = self._queue_by_slack.head
        if head is None or not slack.is_pressing(head, now):
            return
        has_blocks = self.blocks.may_allocate(head)
        if self.num_running < self.config.max_num_seqs and has_blocks:
            return
        if self._is_held_back(head):
            return
        if (displaced := slack.displaced(self._running)) is None:
            return
        slack.look_ahead((one for one in self._running if one is not displaced), self._waiting_room, now)
        if slack.may_join(head, self._sums.shape):
            self._preempt(displaced, output)
            output.displaced = displaced if has_blocks else None
            self._queue_by_slack.lead(head)  # the place is not for the displaced one, whatever its slack

    def _first_by_slack(self, slack: SlackPolicy, output: SchedulerOutput, now: float) -> Request | None:
        self._drop_late(slack, output, now)
        return self._first_waiting()

    def _drop_late(self, slack: SlackPolicy, output: SchedulerOutput, now: float) -> None:
        for late in slack.take_late(self._queue_by_slack, now):
            output.late.append(late)
            if late.is_refused:
                self._finish(late.request, RequestStatus.FINISHED_ABORTED)

    # ------------------------------------------------------------------------------------------ admission

    def admit_remote(self, now: float) -> SchedulerOutput:
        """Parks newcomers from the queue's head, in mid-step. Stops if a block would be copied to host memory: a device
        copies after the step, and a fetch into the block does not wait for that."""
        output, nothing = SchedulerOutput(), StepBudget(0, self.config.chunk_size)
        self._hand_over_cached(output, now)
        self._choose_order(now)
        if self.slack is not None and self.slack.knows_times:
            self.slack.look_ahead(self._running, self._waiting_room, now)
        while (request := self._first_waiting()) and not self.blocks.may_demote(request.num_tokens):
            if not self._admit_one(request, nothing, output, now):
                break
        output.host_copies = self.blocks.take_copies()
        return output

    def _hand_over_cached(self, output: SchedulerOutput, now: float) -> None:
        """Publishes parts of prompts of which the device has all blocks: nothing is computed for them, so they wait for
        no turn."""
        if not self._parts:
            return
        # One of this status is in the queue: whoever takes a part out of it gives it another, for good. Looking for it
        # there would take as long as the queue is.
        self._parts = [one for one in self._parts if one.status is RequestStatus.WAITING]
        for request in [one for one in self._parts if self.blocks.has_all(one)]:
            num_blocks = request.num_prompt_tokens // self.blocks.block_size
            self._waiting.remove(request)
            self._parts.remove(request)
            self.blocks.allocate(request, request.num_tokens, num_blocks)
            request.scheduled_time = now
            request.num_computed_tokens = request.num_cached_tokens = request.num_prompt_tokens
            self.blocks.counts.device_hits += num_blocks
            output.publishes += self._publish(request)
            output.parts.append(self._lease(request))

    def _lease(self, request: Request) -> Request:
        """A prefill that is done: its blocks are held until it is released."""
        request.status = RequestStatus.FINISHED_LEASED
        self._sums.note(request)
        if self.slack is not None:
            self.slack.forget(request)
        self._with_targets.discard(request)
        return request

    def _admit(self, budget: StepBudget, output: SchedulerOutput, now: float) -> None:
        """Admits requests in the order of the queue, up to the first one that does not fit."""
        while (request := self._first_waiting()) is not None:
            if not self._admit_one(request, budget, output, now):
                return

    def _first_waiting(self) -> Request | None:
        if not self._waiting:
            return None
        return self._waiting.first(self._running, self.config.max_num_seqs - self.num_running)

    def _admit_one(
        self, request: Request, budget: StepBudget, output: SchedulerOutput, now: float, *, is_overdue: bool = False
    ) -> bool:
        """Admits a request of the queue. Returns False if it has to wait. `is_overdue`: it has waited too long to wait
        for others' targets."""
        if self.num_running >= self.config.max_num_seqs or output.preempted:
            return False  # what was just preempted must not come back in the same step
        is_one_row = request.status is RequestStatus.SWAPPED and request.num_missing_tokens == 1
        # The budget was raised for the overdue one, by no more than it lacks.
        asks_exactly = is_one_row or is_overdue
        is_spent = not budget.chunk(request.num_missing_tokens) if asks_exactly else budget.is_spent
        if is_spent and (request.mode is not RequestMode.REMOTE or request.status is not RequestStatus.WAITING):
            return False
        if self.slack is not None and not is_overdue and not self.slack.may_join(request, self._sums.shape):
            return False
        if not (self.blocks.swap_in(request) if request.status is RequestStatus.SWAPPED else self._allocate(request)):
            return False
        self._waiting.remove(request)
        if request.scheduled_time is None:
            request.scheduled_time = now
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.status is RequestStatus.WAITING and self._waiting_room.park(request):
            if self.slack is not None:
                self.slack.admitted(request, now)
            return True
        request.status = RequestStatus.RUNNING
        self._running.append(request)
        self._sums.note(request)
        if self.slack is not None:
            self.slack.admitted(request, now)
        output.publishes += self._publish(request)
        self._schedule_running(request, budget, output)
        return True

    def _allocate(self, request: Request) -> bool:
        """Blocks for all tokens known so far, the cached prefix shared. Returns False if there are too few.

        All of them at once, so that a prefill never runs out of blocks half-way, and a remote prompt has blocks to be
        fetched into.
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

    # --------------------------------------------------------------------------------------------- update

    def update(self, output: SchedulerOutput, tokens: Sequence[Sequence[SampledToken]]) -> StepResult:
        """Takes in a step's results; `tokens` in the order of `output.num_tokens`: none for those that are not done,
        and beyond the first, one after each token that was drafted rightly."""
        result = StepResult()
        for (request, num_new), news in zip(output.num_tokens.items(), tokens, strict=True):
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted or failed meanwhile
            self._computed(request, num_new, result)
            if request.mode is RequestMode.PREFILL:
                self._update_prefill(request, num_new, news, result)
            elif not news:
                self._sums.note(request)
            else:
                if num_new > 1:  # a prompt is done; others may need it long before the answer is done
                    self._offer(request)
                result.tokens.append(self.append(request, news[0]))
                if request in output.drafts:
                    self._update_drafted(request, news[1:], result)
        if self.slack is not None and not self.has_work:
            self.slack.pause()
        return result

    def _update_prefill(self, request: Request, num_new: int, news: Sequence[SampledToken], result: StepResult) -> None:
        if request.is_part and not request.num_missing_tokens:
            self._offer(request)
            self._running.remove(request)
            result.parts.append(self._lease(request))
        elif not news:
            self._sums.note(request)
        else:
            if num_new > 1:
                self._offer(request)
            self._running.remove(request)
            request.status = RequestStatus.FINISHED_LEASED
            self._sums.note(request)
            self._with_targets.discard(request)
            result.tokens.append(NewToken(request, news[0], None))

    def _update_drafted(self, request: Request, news: Sequence[SampledToken], result: StepResult) -> None:
        """`news`: one token after each that was drafted rightly."""
        for token in news:
            if request.status is not RequestStatus.RUNNING:
                return
            self._computed(request, 1, result)  # the token before it, which was drafted
            result.tokens.append(self.append(request, token))
        if request.status is RequestStatus.RUNNING:
            self.blocks.shrink(request, request.num_tokens)

    def why_give_up(self, output: SchedulerOutput, now: float) -> Literal["", "ended", "urgent"]:
        """Why the rest of a step that is being computed is not wanted: all its requests have ended; or it has prompts
        alone, and one that came since it began would be late after it. Empty if it is wanted."""
        if not any(request.status is RequestStatus.RUNNING for request in output.num_tokens):
            return "ended"
        return "urgent" if self.slack is not None and self._has_urgent(self.slack, output, now) else ""

    def _has_urgent(self, slack: SlackPolicy, output: SchedulerOutput, now: float) -> bool:
        if not slack.knows_times or (head := self._queue_by_slack.head) is None:
            return False
        if not slack.cannot_wait(head, output.num_tokens, now) or self.num_running >= self.config.max_num_seqs:
            return False
        if not self.blocks.may_allocate(head) or self._is_held_back(head):
            return False
        return slack.may_join(head, self._sums.shape)

    def give_up(self, output: SchedulerOutput) -> None:
        """Nothing of a step was computed: its requests are where they were."""
        for request in output.num_tokens:
            if request.status is RequestStatus.RUNNING:
                request.num_given_up += 1
                if request in output.drafts:
                    self.blocks.shrink(request, request.num_tokens)
        if self.slack is not None:
            self.slack.gave_up()

    def repeat(self, requests: Sequence[Request], num_steps: int) -> list[NewToken]:
        """What so many steps come to in which each of `requests`, which decode, draws its last token again: simulations
        make them at once. Nobody may end before the last of these steps, and there have to be blocks for all: raises
        `ValueError` if there are not. Returns the tokens of the last step."""
        result = StepResult()
        if self.slack is not None:
            self.slack.pause()
        for request in requests:
            last = request.token_ids[-1]
            request.token_ids += [last] * (num_steps - 1)
            if not self.blocks.append(request, request.num_tokens):
                raise ValueError(f"{num_steps} steps of request {request.request_id} have too few blocks")
            self._computed(request, num_steps, result)
            result.tokens.append(self.append(request, SampledToken(last)))
            if request.status is RequestStatus.RUNNING:
                self.blocks.append(request, request.num_tokens)  # as the next step would
        return result.tokens

    def _computed(self, request: Request, num_new: int, result: StepResult) -> None:
        """Notes that the KV of the request's next `num_new` tokens is computed."""
        request.num_computed_tokens += num_new
        if request.num_computed_tokens // self.blocks.block_size > request.num_named_blocks:
            self.blocks.name_computed(request)
        if request.mode is RequestMode.PREFILL:
            result.publishes += self._publish(request)
        elif self.config.window:  # of a prefill its decode worker reads all blocks
            self.blocks.free_unseen(request, request.num_computed_tokens + 1 - self.config.window)

    def _publish(self, request: Request) -> list[Publish]:
        return next_publication(request, self.blocks, only_at_end=self.config.announce == "end")

    def append(self, request: Request, token: SampledToken) -> NewToken:
        """Adds a token to the answer, sampled here or by a prefill worker; ends the request if it is the last one."""
        reason = request.append(token.token_id, self.config.eos_token_ids, self.config.max_model_len)
        if reason is None:
            self._sums.note(request)
        else:
            self._room.ended(request.num_output_tokens)
            is_stop = reason is FinishReason.STOP
            self._finish(request, RequestStatus.FINISHED_STOPPED if is_stop else RequestStatus.FINISHED_LENGTH)
        return NewToken(request, token, reason)

    def _offer(self, request: Request) -> None:
        """Queues what a request computed to be written to the store, unless its handoff has brought it there."""
        if request.mode is not RequestMode.PREFILL or not self.config.handoff_is_store:
            self.blocks.write_back.offer(request)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        self._waiting_room.leave(request)
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self._offer(request)
        request.status = status
        self._sums.note(request)
        if self.slack is not None:
            self.slack.forget(request)
        self._with_targets.discard(request)
        self.blocks.free(request)
        del self.requests[request.request_id]

    def check_integrity(self) -> list[str]:
        """What is wrong with blocks or queues; empty if nothing is."""
        return problems(self.requests, [*self._waiting, *self._running], self._waiting_room, self.blocks)
