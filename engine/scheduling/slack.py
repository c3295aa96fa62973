"""Which requests a step computes so that latency targets are met: the least slack first. Pure.

    slack = when the next token is due - now - predicted time until that token, if the request is computed alone

The first token is due when the time to the first token (TTFT) has passed since the request came to its router; each
further one when the mean time per output token (TPOT) has passed once more since the first. A request without targets
is best effort: it is due `BEST_EFFORT_S` after its arrival, so its slack shrinks like that of any other.

    decodes    all, in a step that may take until the most urgent of them is due; best effort sits out a step that
               would be too long with it
    prompts    running and waiting ones in one order, one after the other: while requests with targets come, a step has
               tokens for one whole chunk; chunks are cut to the time that decodes and prompts before them leave
               (`TimeBudget`)
    newcomers  wait while one more decode would make each step too long for the tightest TPOT target
    late       a prompt that cannot be in time, or that would make several others late, goes after all that can, and
               so does best effort whose time is over; what has waited too long gets `LATE_SHARE` of the time, so
               nobody starves

Orders by deadlines fail if there is more work than time, since then each request is begun when it is just too late
(Buttazzo et al., 1995). So requests leave the order as soon as they are expected to be late: by how many times as long
as alone prompts have lately taken beside others or, if a prefill worker computes the prompt, by how often first tokens
come from there. They are called late, and may be refused, only if even alone they would be; or, if they would make
several others late, if even alone they would be after those.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from msgspec.structs import replace

from common.batch_time import BatchTime, StepShape, chunk_shape
from engine.blocks.block_manager import BlockManager
from engine.messages import RequestMode
from engine.request import Request, RequestStatus
from engine.scheduling.pace import Pace
from engine.scheduling.schedule import LateRequest, SchedulerConfig
from engine.scheduling.step_budget import TimeBudget
from engine.scheduling.waiting_queue import SlackQueue

BEST_EFFORT_S = 30.0  # after which best effort, a request that missed its target included, has waited too long
RESUME_S = 3.0  # the same for best effort that was preempted
SIT_OUT_S = 0.5  # most time between two tokens of best effort that steps leave out
SPARE = 1.2  # times the median: of a chunk that is computed beside decodes, and of one of many steps at most
LATE_SHARE = 0.125  # of the time, for prompts that have waited too long
MARGIN = 0.02  # of a TTFT target, for what follows the step: messages, and noise
PACE_MARGIN = 0.05  # of a TPOT target
CATCH_UP = 0.8  # of the TPOT target: the steps of a decode that is behind its pace
CREDIT = 1.0  # TPOT targets: the longest step, however far decodes are ahead of their pace
SIGHT = 16  # requests next in the queue that a prompt may make late
MOST_HARM = 1  # of them that a prompt may make late
LEARNING = 0.125  # weight of the latest prompt
MAX_STRETCH = 8.0
HOST_LEARNING = 1 / 16
MOST_GIVEN_UP = 2  # of a prompt's steps, for those that come later and cannot wait
IDLE_S = 0.05  # a longer pause between two steps is none of the host's work


@dataclass(slots=True)
class _Rows:
    num: int = 0
    context: int = 0
    longest: int = 0

    def add(self, context: int) -> None:
        self.num += 1
        self.context += context
        self.longest = max(self.longest, context)


@dataclass(slots=True, frozen=True)
class _Harm:
    """What a prompt does to the next ones in the order if it goes first."""

    num_late: int  # are late, and are not if it does not
    behind_s: float  # those that are in time without it take so long, each alone


class SlackPolicy:
    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, batch_time: Callable[[], BatchTime | None]
    ) -> None:
        """`batch_time`: how long steps take; None until that is known well enough to decide by it."""
        self._config = config
        self._blocks = blocks
        self._batch_time = batch_time
        self._time: BatchTime | None = None
        self._stretch = 1.0  # how many times as long as predicted alone prompts take from admission to first token
        self._host_s = 0.0  # between the device's steps
        self._last_step: tuple[float, float] | None = None  # when it was decided, and its predicted seconds
        self._finishing: list[tuple[float, float]] = []  # of prompts that the last step computed to their ends
        self._admitted: dict[Request, tuple[float, float]] = {}  # prompts: when, and seconds that they take alone
        self._overdue: Request | None = None  # the prompt that is overdue for the longest
        self._share_at: float | None = None  # when nothing was overdue, or such a prompt got its share
        self._watched: list[tuple[float, int, Request]] = []  # heap: when newcomers are late if they do not begin
        self._fallen_back: list[Request] = []  # no prefill worker computes their prompts, which nobody looked at yet
        self._numbers = count()
        self._targets_at = -math.inf  # when the last request with targets came
        self._ahead = _Rows()  # requests with a TPOT target that decode now or soon
        self._patient = _Rows()  # those without
        self._tightest = math.inf  # TPOT target of those
        self._num_parked = 0  # prompts that prefill workers compute, until their first token is seen
        self._num_asked = 0  # of them, those that can still be in time
        self._remote_s = 0.0  # from one first token of such a prompt to the next
        self._remote_at = 0.0  # when the last one came, or the first one was asked for

    @property
    def knows_times(self) -> bool:
        return self._time is not None

    @property
    def would_know_times(self) -> bool:
        """Whether it will if it begins a step now."""
        return self._batch_time() is not None

    # ---------------------------------------------------------------------------------------- before a step

    def begin(self, now: float) -> bool:
        """Before a step is decided. Returns whether the model of time is another one: waiting requests get their paces
        anew."""
        time = self._batch_time()
        has_changed = time is not self._time
        self._time = time
        if has_changed:
            self._watched.clear()
            if time is None:
                self._fallen_back.clear()
        self._learn(now)
        return has_changed

    def enter(self, request: Request) -> None:
        """Sets the pace of a request that waits, again if it was preempted."""
        if self._time is None:
            request.pace = None
            return
        if request.targets is not None:
            self._targets_at = max(self._targets_at, request.arrival_time)
        pace = request.pace
        if pace is None:
            pace = request.pace = self._new_pace(request)
        if request.num_output_tokens and pace.num_tokens:  # preempted
            pace.due = pace.next_due if pace.tpot_s is not None else pace.token_at + RESUME_S
            pace.has_target, pace.is_late, pace.overdue_at = pace.tpot_s is not None, False, pace.due
        if pace.has_target:  # the place of best effort in the order does not depend on its work
            self._predict_work(request, pace)
        if request.scheduled_time is None and not request.num_output_tokens and not request.is_follow_up:
            self._watch(request, pace)

    def _new_pace(self, request: Request) -> Pace:
        targets = request.targets
        best_effort_due = request.queue_time + BEST_EFFORT_S
        # A request of high priority may be due before it has come: that is its place in the order, it has not waited.
        overdue_at = max(best_effort_due, request.arrival_time + BEST_EFFORT_S)
        if targets is None:
            return Pace(due=best_effort_due, overdue_at=overdue_at, has_target=False)
        tpot_s = None if targets.tpot_ms is None else targets.tpot_ms / 1000 * (1 - PACE_MARGIN)
        if targets.ttft_ms is None:
            return Pace(due=best_effort_due, overdue_at=overdue_at, has_target=False, tpot_s=tpot_s)
        ttft_s = targets.ttft_ms / 1000
        # An answer that began elsewhere: who reads it has waited since it stopped.
        asked_at = request.arrival_time - (0.0 if request.num_output_tokens else request.age_s)
        return Pace(
            due=asked_at + ttft_s * (1 - MARGIN),
            overdue_at=overdue_at,
            has_target=True,
            target_due=asked_at + ttft_s,
            tpot_s=tpot_s,
        )

    def _predict_work(self, request: Request, pace: Pace) -> None:
        pace.num_computed = request.num_computed_tokens
        if request.status is RequestStatus.SWAPPED:
            pace.work_s = self._decode_s(request.num_tokens)
        elif request.mode is RequestMode.REMOTE and request.scheduled_time is None:
            pace.work_s = 0.0  # a prefill worker computes the prompt, and says nothing of when
        else:
            past = request.num_computed_tokens
            if not request.block_ids:
                num_found = max(self._blocks.find_prefix(request), request.num_stored_blocks)
                past = min(num_found * self._blocks.block_size, request.num_tokens - 1)
            pace.work_s = self._prompt_s(request.num_tokens - past, past)

    def _prompt_s(self, num_missing: int, past: int) -> float:
        """Predicted, alone, in chunks. Times of equal chunks grow evenly with what is before them."""
        size = min(self._config.chunk_size, self._config.max_num_batched_tokens)
        num_whole, rest = divmod(num_missing, size)
        seconds = self._chunk_s(rest, past + num_whole * size) if rest else 0.0
        if num_whole:
            first, last = self._chunk_s(size, past), self._chunk_s(size, past + (num_whole - 1) * size)
            seconds += num_whole * (first + last) / 2
        return seconds

    def _chunk_s(self, num_new: int, past: int) -> float:
        if num_new == 1:
            return self._decode_s(past + 1)
        return self._model.seconds(chunk_shape(num_new, past))

    def _decode_s(self, context: int) -> float:
        shape = StepShape(num_decodes=1, decode_context=context, longest_context=context, num_head_rows=1)
        return self._model.seconds(shape)

    @property
    def _model(self) -> BatchTime:
        if self._time is None:
            raise ValueError("nobody knows how long steps take")
        return self._time

    # ------------------------------------------------------------------------------------------------ late

    def taken_back(self, request: Request) -> None:
        """What prefill workers bring of its prompt is here. If that is nothing, it is as late as a newcomer can be."""
        if self._time is not None and request.fallback_reason and self._is_untouched(request):
            self._fallen_back.append(request)

    @staticmethod
    def _is_untouched(request: Request) -> bool:
        """Whether nobody has computed anything for it."""
        return not request.num_output_tokens and request.num_computed_tokens <= request.num_cached_tokens

    def _watch(self, request: Request, pace: Pace) -> None:
        too_late = pace.target_due - pace.work_s
        has_decodes = request.mode is not RequestMode.PREFILL
        if (
            has_decodes
            and pace.tpot_s is not None
            and self._decode_s(request.num_tokens) * (1 - PACE_MARGIN) > pace.tpot_s
        ):
            too_late = -math.inf
        if too_late < math.inf:
            heapq.heappush(self._watched, (too_late, next(self._numbers), request))

    def take_late(self, queue: SlackQueue, now: float) -> list[LateRequest]:
        """Newcomers that cannot meet their targets any more, even alone. They are best effort from now on, or have to
        be finished. Moves those that are only expected to be late behind all others."""
        late: list[LateRequest] = []
        if len(self._watched) > 2 * len(queue) + 64:  # targets may be a day away, and requests end long before
            self._watched = [one for one in self._watched if one[2] in queue]
            heapq.heapify(self._watched)
        while self._watched and self._watched[0][0] < now:
            too_late, _, request = heapq.heappop(self._watched)
            pace = request.pace
            if pace is None or pace.is_told or request.scheduled_time is not None or request not in queue:
                continue
            if math.isinf(too_late):  # its TPOT target
                tpot_ms = 1000 * (pace.tpot_s or 0.0) / (1 - PACE_MARGIN)
                reason = f"no step is as short as its target for a token, {tpot_ms:g} ms"
                pace.tpot_s = None
                if not self._refuses:  # its first token may be in time
                    pace.is_told = True
                    late.append(LateRequest(request, reason, is_refused=False))
                    continue
            else:
                self._predict_work(request, pace)  # more of its prompt may be cached by now
                if pace.target_due - pace.work_s >= now:
                    self._watch(request, pace)
                    continue
                reason = _takes_too_long(pace, now)
            late.append(self._told(request, pace, reason))
            queue.move(request)
        late += self._late_fallbacks(now)
        late += self._move_late(queue, now)
        return late

    def _late_fallbacks(self, now: float) -> list[LateRequest]:
        """Of requests whose prompts no prefill worker computes: those that cannot be in time here, either."""
        late: list[LateRequest] = []
        for request in self._fallen_back:
            if request.status is not RequestStatus.RUNNING or (pace := self._pace(request)).is_told:
                continue
            self._predict_work(request, pace)
            if pace.target_due - pace.work_s < now and not request.is_follow_up and self._is_untouched(request):
                reason = f"{_takes_too_long(pace, now)}; {request.fallback_reason}"
                late.append(self._told(request, pace, reason))
        self._fallen_back.clear()
        return late

    def _told(
        self, request: Request, pace: Pace, reason: str, cause: Literal["late", "others"] = "late"
    ) -> LateRequest:
        """It is best effort from now on, or ends."""
        pace.is_told = True
        self._give_up(request, pace)
        return LateRequest(request, reason, self._refuses, cause)

    @property
    def _refuses(self) -> bool:
        return self._config.slo_late == "refuse"

    def _move_late(self, queue: SlackQueue, now: float) -> list[LateRequest]:
        """Each request moves once, so that this is constant work for each. Returns those that would make several others
        late, and are late if these go first."""
        late: list[LateRequest] = []
        while (head := queue.head) is not None and head.scheduled_time is None and (pace := head.pace) is not None:
            if not pace.has_target:
                # Best effort stays in the order of its arrival: not before what has to go last and came earlier.
                if now <= pace.due and pace.due <= queue.late_due:
                    break
                pace.is_late = True
            elif head.is_follow_up:  # a further step of a search goes on however late it is, as a decode does
                break
            elif pace.due - self._expected_s(head, pace) < now:
                self._give_up(head, pace)
            elif (harm := self._harm(head, queue, now)).num_late <= MOST_HARM:
                break
            elif now + harm.behind_s + pace.work_s <= pace.target_due or pace.is_told:
                self._give_up(head, pace)
            else:
                reason = (
                    f"it would make {harm.num_late} others late, and it waits {1000 * harm.behind_s:.0f} ms if they go "
                    f"first: {_takes_too_long(pace, now)}"
                )
                late.append(self._told(head, pace, reason, "others"))
            queue.move(head)
        return late

    @staticmethod
    def _give_up(request: Request, pace: Pace) -> None:
        pace.has_target, pace.is_late = False, True
        pace.due = request.queue_time + BEST_EFFORT_S

    def _expected_s(self, request: Request, pace: Pace) -> float:
        if request.mode is RequestMode.REMOTE and request.scheduled_time is None:
            return (self._num_asked + 1) * self._remote_s  # those before it come first (Little's law)
        return pace.work_s * self._stretch

    def _harm(self, request: Request, queue: SlackQueue, now: float) -> _Harm:
        if request.pace is None or request.mode is RequestMode.REMOTE:
            return _Harm(0, 0.0)
        without, beside = now, now + self._expected_s(request, request.pace)
        num_lost, behind_s = 0, 0.0
        for other in queue.on_time_after(request, SIGHT):
            pace = other.pace
            if pace is None or not pace.has_target or other.mode is RequestMode.REMOTE:
                continue
            work_s = self._expected_s(other, pace)
            if without + work_s <= pace.due:
                without += work_s
                behind_s += pace.work_s
                num_lost += 1
            if beside + work_s <= pace.due:
                beside += work_s
                num_lost -= 1
        return _Harm(num_lost, behind_s)

    # --------------------------------------------------------------------------------------------- decodes

    def plan(
        self, decodes: Sequence[Request], sums: StepShape, now: float, *, has_blocks: bool
    ) -> tuple[Sequence[Request], TimeBudget]:
        """The decodes that this step computes, and what is left beside them. `sums`: those of all `decodes`.
        `has_blocks`: no decode will take another one's blocks."""
        config, model = self._config, self._model
        self._learn_remote(decodes, now)
        within, dues = math.inf, []
        alone = self._steady_s(sums) if decodes else 0.0
        for one in decodes:
            due, limit = self._due_and_limit(one, now, alone)
            dues.append(due)
            within = min(within, limit)
        chosen = decodes
        if within < alone:
            chosen, sums, alone = self._without_patient(decodes, dues, sums, now, within, alone)
            within = max(within, alone)
        if not has_blocks or len(decodes) > config.max_num_batched_tokens:
            due_of = dict(zip(decodes, dues, strict=True))
            chosen = sorted(chosen, key=lambda one: due_of[one])
        has_targets = now - self._targets_at < BEST_EFFORT_S
        budget = TimeBudget(
            config.max_num_batched_tokens,
            config.chunk_size,
            model,
            sums,
            max(within - self._host_s, 0.0),
            # Prompts beside each other would all be done late, and the next one would wait for a long step.
            num_of_prompts=config.chunk_size if has_targets else None,
        )
        return chosen, budget

    def _learn_remote(self, decodes: Iterable[Request], now: float) -> None:
        """How often first tokens come from prefill workers, those of late requests, too. While only one is waited for,
        that takes as long as a whole prefill, so it may only show that they come more often."""
        came = [
            one.pace
            for one in decodes
            if one.mode is RequestMode.REMOTE
            and one.pace is not None
            and one.pace.since is None
            and one.num_output_tokens > 0
        ]
        if came:
            each_s = (now - self._remote_at) / len(came)
            if self._num_parked > len(came) or each_s < self._remote_s:
                self._remote_s += (each_s - self._remote_s) * LEARNING
        if came or not self._num_parked:
            self._remote_at = now
        self._num_parked = max(self._num_parked - len(came), 0)
        self._num_asked = max(self._num_asked - sum(not pace.is_late for pace in came), 0)

    def _due_and_limit(self, request: Request, now: float, alone: float) -> tuple[float, float]:
        """(when the next token of a decode is due, most seconds that this step may take for that)."""
        pace = request.pace or self._pace(request)
        num_tokens = len(request.token_ids) - request.num_prompt_tokens
        pace.see(num_tokens, now)
        if pace.since is None:  # its prompt is computed but for one token
            if pace.has_target and pace.due >= now + alone:
                return pace.due, pace.due - now
            return pace.due, math.inf
        if (tpot_s := pace.tpot_s) is None:
            return pace.token_at + SIT_OUT_S, math.inf
        due = pace.since + (num_tokens - pace.num_since + 1) * tpot_s
        if (behind := now + alone - due) > 0:
            num_left = request.sampling_params.max_tokens - num_tokens
            if behind > max(num_left * (tpot_s - alone), tpot_s):
                # It cannot catch up any more, so nobody waits for that.
                return due, CREDIT * tpot_s if CREDIT * tpot_s >= alone else math.inf
        return due, min(max(due - now, CATCH_UP * tpot_s), CREDIT * tpot_s)

    def _without_patient(
        self,
        decodes: Sequence[Request],
        dues: Sequence[float],
        sums: StepShape,
        now: float,
        within: float,
        alone: float,
    ) -> tuple[Sequence[Request], StepShape, float]:
        """Leaves decodes out that are in time with the step after this one, if the others are so urgent that they are
        not in time beside them: as many as need be, those with the most slack."""
        ordered = sorted(zip(dues, range(len(decodes)), strict=True))
        num_urgent = sum(due < now + within + alone for due in dues)
        if num_urgent == len(decodes):
            return decodes, sums, alone
        contexts = [0]
        for _, index in ordered:
            contexts.append(contexts[-1] + decodes[index].num_tokens)

        def seconds(num: int) -> tuple[StepShape, float]:
            shape = _first_of(sums, num, contexts[num])
            return shape, self._steady_s(shape)

        fits, too_many = max(num_urgent, 1), len(decodes)
        best = seconds(fits)
        while best[1] <= within and too_many - fits > 1:
            middle = (fits + too_many) // 2
            if (found := seconds(middle))[1] <= within:
                fits, best = middle, found
            else:
                too_many = middle
        return [decodes[index] for _, index in ordered[:fits]], *best

    # --------------------------------------------------------------------------------------------- prompts

    def order(self, prompts: Iterable[Request], now: float) -> list[Request]:
        """Running prompts, the least slack first."""
        ordered = []
        for request in prompts:
            pace = self._pace(request)
            pace.see(request.num_output_tokens, now)
            if pace.num_computed != request.num_computed_tokens:
                self._predict_work(request, pace)
            if pace.has_target and not request.num_output_tokens and pace.target_due - pace.work_s < now:
                pace.has_target, pace.is_late = False, True  # `due` stays: its blocks are free the sooner it ends
            elif not pace.has_target and pace.due < now:
                pace.is_late = True
            ordered.append(request)
        return sorted(ordered, key=_order)

    @staticmethod
    def goes_before(request: Request, other: Request) -> bool:
        return _order(request) <= _order(other)

    def share_of_late(self, prompts: Sequence[Request], queue: SlackQueue, now: float) -> Request | None:
        """An overdue prompt, running or waiting, whose turn has come though others have targets to meet."""
        running = next((one for one in prompts if one.pace is not None and one.pace.is_late), None)
        found = [one for one in (running, queue.overdue(now)) if one is not None]
        self._overdue = overdue = min(found, key=_order, default=None)
        if overdue is None or self._share_at is None:
            self._share_at = now
            return None
        return overdue if (now - self._share_at) * LATE_SHARE >= self.chunk_p90(overdue) else None

    def chunk_p90(self, request: Request) -> float:
        """Seconds of the next chunk of a prompt, which nine in ten stay below."""
        num_new = min(request.num_missing_tokens, self._config.chunk_size)
        return self._chunk_s(num_new, request.num_computed_tokens) * SPARE

    def bound(self, request: Request, budget: TimeBudget, now: float) -> None:
        """A prompt was given its chunk: what follows it in the step may take its slack, and no more."""
        pace = request.pace
        if pace is None or not pace.has_target or request.num_output_tokens:
            return
        slack = max(pace.due - now - self._expected_s(request, pace), 0.0)
        budget.within = min(budget.within, budget.seconds + slack)

    # ------------------------------------------------------------------------------------------- newcomers

    def look_ahead(self, running: Iterable[Request], parked: Iterable[Request], now: float) -> None:
        """Before requests are admitted: who decodes now or soon."""
        self._ahead, self._patient = _Rows(), _Rows()
        self._tightest = math.inf
        for request in running:
            self._count_ahead(request)
        self._num_parked = self._num_asked = 0
        for request in parked:
            self._count_ahead(request)
            self._count_parked(request, now)
        if not self._num_parked:
            self._remote_at = now

    def _count_parked(self, request: Request, now: float) -> None:
        if request.mode is RequestMode.REMOTE:
            pace = self._pace(request)
            self._num_parked += pace.since is None
            self._num_asked += not request.num_output_tokens and not pace.is_late and pace.target_due >= now

    def _count_ahead(self, request: Request) -> None:
        if request.mode is RequestMode.PREFILL or request.embed is not None:
            return
        tpot_s = self._pace(request).tpot_s
        (self._patient if tpot_s is None else self._ahead).add(request.num_tokens)
        self._tightest = min(self._tightest, tpot_s or math.inf)

    def may_join(self, request: Request, sums: StepShape) -> bool:
        """Whether those that decode, and the newcomer, keep their TPOT targets with one row more. `sums`: of those that
        decode now. Best effort counts as often as it has to be in a step."""
        if self._time is None or request.mode is RequestMode.PREFILL or request.embed is not None:
            return True
        tpot_s = self._pace(request).tpot_s
        tightest = min(self._tightest, tpot_s or math.inf)
        if math.isinf(tightest) or not self._ahead.num + self._patient.num:
            return True
        share = min(tightest / SIT_OUT_S, 1.0)
        weight = 1.0 if tpot_s is not None else share
        num = self._ahead.num + share * self._patient.num + weight
        context = self._ahead.context + share * self._patient.context + weight * request.num_tokens
        longest = max(self._ahead.longest, self._patient.longest, request.num_tokens)
        shape = replace(_first_of(sums, math.ceil(num), int(context)), longest_context=longest)
        return self._steady_s(shape) <= tightest

    def _steady_s(self, shape: StepShape) -> float:
        """Seconds of each of many such steps: of a pace. What nine in ten single steps stay below is too much if steps
        differ widely, since in a mean that evens out: few would decode at a time, and all others would be late."""
        found = self._model.predict(shape)
        return min(found.p90, SPARE * found.median) + self._host_s

    def is_pressing(self, request: Request, now: float) -> bool:
        """Whether a waiting request has targets and half of its time is gone: best effort makes room for it."""
        pace = request.pace
        if pace is None or not pace.has_target or request.num_output_tokens:
            return False
        return pace.start_by - now < (pace.start_by - request.arrival_time) / 2

    @staticmethod
    def displaced(running: Iterable[Request]) -> Request | None:
        """Who makes room: best effort that never had to before, the latest first."""
        able = [
            one
            for one in running
            if one.mode is not RequestMode.PREFILL
            and not one.num_preemptions
            and not one.num_pending
            and one.pace is not None
            and one.pace.tpot_s is None
            and (one.pace.since is not None or not one.pace.has_target)
        ]
        return max(able, key=lambda one: one.queue_time, default=None)

    def admitted(self, request: Request, now: float) -> None:
        if self._time is None:
            return
        self._count_ahead(request)
        pace = self._pace(request)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            self._count_parked(request, now)
        if request.status is RequestStatus.RUNNING and not request.num_output_tokens:
            self._predict_work(request, pace)
            if pace.work_s > 0:
                self._admitted[request] = now, pace.work_s

    # ------------------------------------------------------------------------------------------ after a step

    def decided(self, num_tokens: Mapping[Request, int], budget: TimeBudget, now: float) -> None:
        """The step is decided: these requests get so many tokens."""
        if self._overdue in num_tokens:
            self._share_at = now
        self._overdue = None
        for request in [one for one in self._admitted if num_tokens.get(one) == one.num_missing_tokens]:
            self._finishing.append(self._admitted.pop(request))
        if budget.shape.num_tokens:
            self._last_step = now, self._model.seconds(budget.shape)

    def cannot_wait(self, request: Request, num_tokens: Mapping[Request, int], now: float) -> bool:
        """Whether a newcomer will be late if it begins after the step that is being computed, which has so many tokens
        of these requests; and is in time if it begins now, and makes none of them late."""
        pace = request.pace
        if self._last_step is None or pace is None or not pace.has_target or request.mode is RequestMode.REMOTE:
            return False
        decided_at, predicted_s = self._last_step
        if request.scheduled_time is not None or request.arrival_time < decided_at:
            return False
        if not now <= pace.start_by < decided_at + predicted_s:
            return False
        for one, num_new in num_tokens.items():
            own = self._pace(one)
            if num_new == 1 or one.num_given_up >= MOST_GIVEN_UP:
                return False
            if own.has_target and now + pace.work_s + own.work_s > own.due:
                return False
        return True

    def gave_up(self) -> None:
        """Nothing of the step was computed."""
        self.pause()
        self._finishing.clear()

    def forget(self, request: Request) -> None:
        """The request has ended, or was preempted."""
        self._admitted.pop(request, None)

    def rest(self) -> None:
        """No request with targets is left: forgets all requests, and what was decided for them."""
        self.pause()
        self._watched.clear()
        self._fallen_back.clear()
        self._admitted.clear()
        self._finishing.clear()
        self._overdue = self._share_at = None
        self._num_parked = self._num_asked = 0

    def pause(self) -> None:
        """The time until the next step says nothing of what the host does between two steps."""
        self._last_step = None

    def _learn(self, now: float) -> None:
        """Learns from the step that has ended by now how long the host took beside the device, and prompts beside
        others."""
        if self._last_step is not None:
            at, predicted_s = self._last_step
            beside_s = now - at - predicted_s
            if beside_s <= predicted_s + IDLE_S:
                self._host_s = max(self._host_s + (beside_s - self._host_s) * HOST_LEARNING, 0.0)
            self._last_step = None
        for admitted_at, alone_s in self._finishing:
            times = min(max((now - admitted_at) / alone_s, 1.0), MAX_STRETCH)
            self._stretch += (times - self._stretch) * LEARNING
        self._finishing.clear()

    def _pace(self, request: Request) -> Pace:
        if request.pace is None:  # admitted before anybody knew how long steps take
            pace = request.pace = self._new_pace(request)
            self._predict_work(request, pace)
        return request.pace


def _takes_too_long(pace: Pace, now: float) -> str:
    left_ms = 1000 * (pace.target_due - now)
    due = f"is due in {left_ms:.0f} ms" if left_ms > 0 else f"was due {-left_ms:.0f} ms ago"
    return f"its first token takes another {1000 * pace.work_s:.0f} ms and {due}"


def _order(request: Request) -> tuple[bool, float]:
    pace = request.pace
    if pace is None:
        return False, request.queue_time
    return pace.is_late, pace.due if pace.is_late else pace.start_by


def _first_of(sums: StepShape, num: int, context: int) -> StepShape:
    """The sums of `num` decodes of so much context together, if they are otherwise like those of `sums`."""
    times = num / max(sums.num_decodes, 1)
    return StepShape(
        num_decodes=num,
        decode_context=context,
        longest_context=sums.longest_context,
        num_head_rows=num,
        num_drawn=round(times * sums.num_drawn),
        num_filtered=round(times * sums.num_filtered),
        num_edited=round(times * sums.num_edited),
        num_masked=round(times * sums.num_masked),
        num_logprobs=round(times * sums.num_logprobs),
    )
