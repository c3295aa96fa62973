"""A worker as plain numbers: what `simulation.worker` does with an engine, without a token or a block.

    waiting ──> prompts, computed in chunks ──> decodes ──> done            (prompts of prefill workers: ──> leased)
          └──> parked: its KV comes from another worker ──┘

Decodes alone go on for as many steps as nobody ends or joins, in the sum of their times. A step with chunks of prompts
is one event. Each decode is (the step in which it ends, context less steps made), so that a step changes none of them.

The order is that of arrival (`fcfs`). Other than in an engine, news of blocks reach the router at once, and a fetch is
shared only with requests that lack hardly more than it brings.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from common.batch_time import StepShape
from common.config import EngineSettings
from common.prefill_place import is_computed_in_place
from common.types import LOAD_INTERVAL_S, SLACKS_S, WorkerLoad, WorkerRole
from engine.scheduling.room import Room
from simulation.block_counts import BlockCounts
from simulation.block_names import name_in_answer
from simulation.clock import VirtualClock
from simulation.counted_router import Reports
from simulation.step_times import Run, StepTimes

NEVER = 2**62  # steps


class Mode(Enum):
    """What is asked of the worker, as `engine.messages.RequestMode`."""

    LOCAL = auto()
    REMOTE = auto()
    PREFILL = auto()


@dataclass(slots=True, eq=False)
class Job:
    """A request on one worker. Counts are tokens, unless said otherwise."""

    key: str
    mode: Mode
    num_prompt: int
    num_output: int
    names: list[bytes]  # of the full blocks of its prompt, then of its answer
    chain: bytes  # of its answer (`block_names`)
    min_remote: int = 0  # missing tokens for which a prefill worker is asked; 0: one block
    num_asked: int = 0  # of the prompt, that a prefill worker may be asked for; less than all: the prompt is split
    first_block: int = 0  # of a prefill: the first one that its decode worker lacks
    num_lendable: int = 0  # leading blocks that the decode worker can lend
    is_part: bool = False  # a prefill that gives no token
    num_computed: int = 0
    num_drawn: int = 0  # of the answer; while it decodes, only once it stops
    num_cached: int = 0  # of the prompt, that were there when it was admitted
    num_published: int = 0  # blocks
    num_preemptions: int = 0
    num_blocks: int = 0  # that it owns
    held: list[bytes] = field(default_factory=list)  # names of those of them that have one
    num_named: int = 0  # leading blocks whose names were given
    rank: int = 0  # in the order of admission
    base: int = 0  # context less the steps that the worker has made, while it decodes
    is_new: bool = True  # never admitted

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_drawn

    @property
    def num_queued(self) -> int:
        """Tokens of its prompt that are to be computed."""
        return max(self.num_prompt - self.num_computed, 0)


class Owner(Protocol):
    """What a worker says, at once."""

    def changing(self, worker: CountedWorker) -> None:
        """Its load is about to change."""

    def idle(self, worker: CountedWorker) -> None:
        """It has nothing to compute."""

    def ask_prefill(self, job: Job, first_block: int, stop_block: int) -> None:
        """A prefill worker has to compute the blocks from `first_block` on; with a `stop_block` those before it."""

    def ask_loan(self, job: Job, first_block: int, stop_block: int) -> None:
        """The decode worker of this prefill has these blocks."""

    def published(self, job: Job, num_blocks: int, *, is_last: bool) -> None:
        """More blocks of a prefill are there; `is_last`: all, and the first token unless it is a part."""

    def needs_no_more(self, job: Job) -> None:
        """A remote request has all its KV, or computes it itself."""

    def first_token(self, job: Job) -> None:
        """The worker drew it."""

    def ended(self, job: Job) -> None:
        """Its answer is complete."""

    def report_blocks(self, worker: CountedWorker, stored: bytes, removed: bytes) -> None: ...


class CountedWorker:
    def __init__(
        self,
        address: str,
        role: WorkerRole,
        settings: EngineSettings,
        times: StepTimes,
        clock: VirtualClock,
        owner: Owner,
        *,
        num_blocks: int,
    ) -> None:
        self.address = address
        self.role = role
        self.busy_s = 0.0
        self.num_steps = 0
        self.reports = Reports()
        self._size = settings.block_size
        self._max_seqs = settings.max_num_seqs
        self._max_tokens = settings.max_num_batched_tokens
        self._chunk = settings.chunk_size
        self._at_end = settings.announce == "end"
        self._slacks = () if settings.queue_policy == "fcfs" else (0,) * len(SLACKS_S)
        self._times = times
        self._clock = clock
        self._owner = owner
        self._blocks = BlockCounts(num_blocks, is_cached=settings.enable_prefix_caching)
        self._room = Room(settings.block_size)
        self._waiting: deque[Job] = deque()
        self._prompts: list[Job] = []  # in the order of admission
        self._parked: dict[Job, None] = {}  # in the order of admission
        self._decodes: list[tuple[int, int, Job]] = []  # heap: the step after which it ends, rank
        self._sum_bases = 0
        self._joining: list[Job] = []  # decode from the next step on
        self._step = 0  # steps that decodes made before the run or step under way
        self._next_block_at = NEVER  # no decode needs a further block before this step
        self._rank = 0
        self._num_queued = 0  # prompt tokens of those that wait or are computed
        self._num_queued_prompts = 0
        self._num_leases = 0
        self._num_held_back = 0  # of those that wait, at the last look for the first
        self._run: Run | None = None
        self._chunks: list[tuple[Job, int]] = []  # of the step under way
        self._step_start = self._step_end = 0.0
        self._step_device_s = 0.0
        self._number = 0  # of the run or step under way: tells the end of one that was cut short
        self._is_turn_due = False

    # ------------------------------------------------------------------------------------------ what comes

    def add(self, job: Job) -> None:
        """A request comes."""
        self._change()
        self.reports.newcomers.append(job.key)
        if job.is_part and self._hand_over_cached(job):
            return
        self._waiting.append(job)
        self._queue(job)
        self._park_newcomers()
        self._go_on()

    def release(self, job: Job) -> None:
        """A prefill's decode worker needs its blocks no more."""
        self._change()
        self._num_leases -= 1
        self._give_up(job)
        self._go_on()

    def settle(self, job: Job, num_blocks: int) -> None:
        """The first `num_blocks` blocks of a parked request are there: all that was asked for. The first token too,
        unless the prompt is split."""
        self._change()
        del self._parked[job]
        if job.mode is Mode.PREFILL:  # what was lent
            job.num_computed = job.num_cached = num_blocks * self._size
        elif job.num_drawn:
            job.num_computed = job.num_prompt
        else:
            job.num_computed = num_blocks * self._size
        self._name(job)
        if job.mode is Mode.REMOTE:
            job.mode = Mode.LOCAL
            self._owner.needs_no_more(job)
        if job.num_drawn:
            self._joining.append(job)
        else:
            self._prompts.append(job)
            self._queue(job)
            self._publish(job)
        self._report_blocks()
        self._go_on()

    def end_parked(self, job: Job) -> None:
        """The first token of a parked request is its last."""
        self._change()
        del self._parked[job]
        job.num_computed = 0  # nothing of it has arrived
        self._owner.needs_no_more(job)
        self._end(job)
        self._go_on()

    # ----------------------------------------------------------------------------------------- what it says

    @property
    def load(self) -> WorkerLoad:
        return self.load_at(self._clock.now)

    def load_at(self, time: float) -> WorkerLoad:
        """`time`: now, or a moment since which nothing has changed but that decodes went on."""
        if self._run is not None and self._next_block_at < self._step + self._run.num_steps:
            self._take_blocks(self._step_at(time))
        blocks = self._blocks
        num_owned, num_cached = blocks.num_owned, blocks.num_cached
        num_held_back = min(self._num_held_back, len(self._waiting))
        return WorkerLoad(
            num_requests_running=self._num_running + num_held_back,
            num_requests_waiting=len(self._waiting) - num_held_back,
            num_queued_prompt_tokens=self._num_queued,
            num_queued_prompts=self._num_queued_prompts,
            queued_by_slack=self._slacks,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_blocks - num_owned - num_cached,
            num_cached_blocks=num_cached,
            num_leases=self._num_leases,
            room_after=() if self._has_room() else self._room_after(),
        )

    def _has_room(self) -> bool:
        """For a newcomer, as `Scheduler.room_after` has it."""
        if self._num_running >= self._max_seqs:
            return False
        return not self._waiting or -(-self._waiting[0].num_tokens // self._size) <= self._blocks.num_available

    def _room_after(self) -> tuple[int, ...]:
        running = [*[job for _, _, job in self._decodes], *self._joining, *self._prompts, *self._parked]
        left = [
            1 if job.mode is Mode.PREFILL else self._room.num_left(job.num_blocks, job.num_prompt, job.num_output)
            for job in running
        ]
        return self._room.after_tokens(left, len(self._waiting) - min(self._num_held_back, len(self._waiting)))

    def boundary(self, time: float) -> float:
        """The first moment from `time` on that is between two steps, as far as steps are known: loads are reported
        then."""
        if self._run is not None:
            return time if time > self._run.end else self._run.step_end(time)
        return max(time, self._step_end) if self._chunks and time > self._step_start else time

    def last_quiet_turn(self, told_at: float, until: float) -> float:
        """When it had its last turn to report before `until`, if only decodes went on, and nothing was to be told."""
        if self._run is None:
            return told_at
        next_s = self.next_block_s
        return self._run.last_turn(told_at, LOAD_INTERVAL_S, until if next_s is None else min(until, next_s))

    def goes_on_after(self, time: float) -> bool:
        """Whether further steps of the run under way end after `time`."""
        return self._run is not None and time < self._run.end

    @property
    def next_block_s(self) -> float | None:
        """When a decode of the run under way takes a further block; None if none does before its end."""
        run = self._run
        if run is None:
            return None
        num_steps = max(self._next_block_at - self._step, 0)
        return run.start + run.seconds(num_steps) if num_steps < run.num_steps else None

    def check_integrity(self) -> list[str]:
        """What is wrong with its blocks or queues once all requests have ended; empty if nothing is."""
        found = {
            "blocks are owned": self._blocks.num_owned,
            "requests wait": len(self._waiting),
            "requests run": self._num_running,
            "prompt tokens are queued": self._num_queued,
            "prompts are queued": self._num_queued_prompts,
            "prefills are leased": self._num_leases,
        }
        return [f"{self.address}: {num} {what}" for what, num in found.items() if num]

    # --------------------------------------------------------------------------------------- steps and runs

    @property
    def _num_running(self) -> int:
        return len(self._decodes) + len(self._joining) + len(self._prompts) + len(self._parked)

    def _change(self) -> None:
        self._owner.changing(self)

    def _go_on(self) -> None:
        """With a step if none is under way; else a run ends with the step under way if the next one has further
        requests."""
        if (run := self._run) is not None:
            has_more = self._joining or self._prompts or self._may_admit()
            limit = run.num_steps
            num_done = run.num_done(self._clock.now)
            if has_more:
                limit = num_done + 1
            elif self._blocks.num_available // len(self._decodes) * self._size < limit - num_done:
                self._take_blocks(self._step_at(self._clock.now))  # a newcomer may have taken some
                limit = num_done + 1 + self._steps_with_blocks(self._step + num_done + 1)
            if limit < run.num_steps:
                run.shorten(limit)
                self._await(run.end)
        elif not self._chunks and not self._is_turn_due:
            if not (self._joining or self._prompts or self._waiting):
                self._report_blocks()
                self._owner.idle(self)
                return
            self._is_turn_due = True
            self._clock.at(self._clock.now, self._turn)

    def _may_admit(self) -> bool:
        """Whether the first that waits may have a place in the next step."""
        job = self._first_waiting()
        if job is None:
            return False
        size, blocks = self._size, self._blocks
        if (num_lacking := -(-job.num_tokens // size) - blocks.num_available) <= 0:
            return True
        return num_lacking <= blocks.find(job.names[: (job.num_tokens - 1) // size])

    def _await(self, end: float) -> None:
        self._number += 1
        number = self._number
        self._clock.at(end, lambda: self._ended(number))

    def _turn(self) -> None:
        """Begins a step or a run, if there is something to compute."""
        self._is_turn_due = False
        if self._run is not None or self._chunks:
            return
        for job in self._joining:
            self._decode(job)
        self._joining.clear()
        has_preempted = self._take_blocks_of_step()
        left = self._max_tokens - len(self._decodes)
        chunks = self._chunks
        for job in self._prompts:
            if left <= 0:
                break
            left -= self._compute(job, left)
        if not has_preempted:
            self._admit(left)
        self._report_blocks()
        if chunks:
            self._begin_step()
        elif self._decodes:
            self._begin_run()
        else:
            self._owner.idle(self)

    def _decode(self, job: Job) -> None:
        """From the next step on."""
        job.base = job.num_tokens - self._step
        self._sum_bases += job.base
        heapq.heappush(self._decodes, (self._step + job.num_output - job.num_drawn, job.rank, job))
        self._next_block_at = min(self._next_block_at, self._step + job.num_blocks * self._size + 1 - job.num_tokens)

    def _compute(self, job: Job, left: int) -> int:
        """A chunk of the prompt, in the next step. Returns its tokens."""
        self._adopt(job)
        num = min(job.num_tokens - job.num_computed, self._chunk, left)
        if self._chunks:
            num = self._up_to_equal(job, num)
        if num > 0:
            self._chunks.append((job, num))
        return num

    def _up_to_equal(self, job: Job, num: int) -> int:
        """`num`, or fewer: up to the first block that another request computes in this step."""
        size, start = self._size, job.num_computed
        computed: set[bytes] = set()
        for other, num_new in self._chunks:
            computed.update(other.names[other.num_computed // size : (other.num_computed + num_new) // size])
        last = min((start + num - 1) // size + 1, (job.num_tokens - 1) // size, len(job.names))
        for number in range(start // size, last):
            if job.names[number] in computed:
                return max(number * size - start, 0)
        return num

    def _adopt(self, job: Job) -> None:
        """Takes over blocks that another request has computed by now."""
        blocks, size, before = self._blocks, self._size, job.num_computed
        if before % size:
            return
        number, stop = before // size, (job.num_tokens - 1) // size
        while number < stop and number < len(job.names) and job.names[number] in blocks:
            blocks.share(job.names[number])
            blocks.give_up((), 1)
            job.held.append(job.names[number])
            number += 1
        if number * size > before:
            self._advance(job, number * size - before)
            self._publish(job)

    def _begin_step(self) -> None:
        num_chunks = new = past = pairs = squares = num_done = 0
        num_decodes = len(self._decodes)
        context = self._sum_bases + num_decodes * self._step
        for job, num in self._chunks:
            before = job.num_computed
            is_done = before + num == job.num_tokens and not job.is_part
            num_done += is_done
            if num == 1:  # a row like a decode's
                num_decodes += 1
                context += before + 1
                continue
            num_chunks += 1
            new += num
            past += before
            pairs += num * before + num * (num + 1) // 2
            squares += num * num
        device_s, host_s = self._times.step(
            StepShape(
                num_decodes=num_decodes,
                decode_context=context,
                longest_context=self._longest_context(),
                num_chunks=num_chunks,
                chunk_tokens=new,
                chunk_past=past,
                chunk_pairs=pairs,
                chunk_squares=squares,
                num_head_rows=len(self._decodes) + num_done,
            )
        )
        self._step_device_s = device_s
        self._step_start = self._clock.now
        self._step_end = self._step_start + device_s + host_s
        self._await(self._step_end)

    def _longest_context(self) -> int:
        if not self._times.needs_longest or not self._decodes:
            return 0
        return max([job.base for _, _, job in self._decodes]) + self._step

    def _begin_run(self) -> None:
        num, step = len(self._decodes), self._step
        num_steps = min(self._decodes[0][0] - step, self._times.longest_run)
        if self._blocks.num_available // num * self._size < num_steps:  # the first one has its blocks
            num_steps = min(num_steps, 1 + self._steps_with_blocks(step + 1))
        context = self._sum_bases + num * step
        self._run = self._times.run(self._clock.now, num_steps, num, context, self._longest_context())
        self._await(self._run.end)

    def _steps_with_blocks(self, step: int) -> int:
        """How many steps from `step` on have the blocks that they need."""
        num_available, size = self._blocks.num_available, self._size
        if num_available >= len(self._decodes):
            return num_available // len(self._decodes) * size
        lacking = sorted([job.num_blocks * size + 1 - job.base for _, _, job in self._decodes])
        return max(lacking[num_available] - step, 0)

    def _ended(self, number: int) -> None:
        """The run or step under way is over, unless it was cut short."""
        if number != self._number:
            return
        self._change()
        if (run := self._run) is not None:
            self._take_blocks(self._step + run.num_steps - 1)
            self._run = None
            self.busy_s += run.end - run.start - run.num_steps * run.host_s
            self.num_steps += run.num_steps
            self._step += run.num_steps
        else:
            self.busy_s += self._step_device_s
            self.num_steps += 1
            self._step += 1
            self._end_chunks()
        while self._decodes and self._decodes[0][0] <= self._step:
            _, _, job = heapq.heappop(self._decodes)
            self._sum_bases -= job.base
            job.num_drawn = job.num_output
            job.num_computed = job.num_tokens - 1
            self._end(job)
        self._turn()

    def _end_chunks(self) -> None:
        chunks, self._chunks = self._chunks, []
        for job, num in chunks:
            self._advance(job, num)
            if job.num_computed < job.num_tokens:
                self._publish(job)
                continue
            self._prompts.remove(job)
            if job.mode is Mode.PREFILL:
                self._num_leases += 1
                self._publish(job)
                continue
            job.num_drawn += 1
            if job.num_drawn == 1:
                self._owner.first_token(job)
            if job.num_drawn == job.num_output:
                self._end(job)
            else:
                self._joining.append(job)

    def _advance(self, job: Job, num_new: int) -> None:
        """Tokens of a job of `_prompts` are computed."""
        before = job.num_queued
        job.num_computed += num_new
        self._num_queued += job.num_queued - before
        self._num_queued_prompts -= before > 0 and not job.num_queued
        self._name(job)

    def _publish(self, job: Job) -> None:
        """What a prefill has computed since the last time, its partial tail with the end."""
        if job.mode is not Mode.PREFILL:
            return
        is_last = job.num_computed >= job.num_prompt
        if self._at_end and not is_last:
            return
        stop = -(-job.num_prompt // self._size) if is_last else job.num_computed // self._size
        start = max(job.num_published, job.first_block)
        if stop > start or is_last:
            job.num_published = stop
            self._owner.published(job, max(stop - start, 0), is_last=is_last)

    def _end(self, job: Job) -> None:
        self._name(job)
        self._give_up(job)
        self._room.ended(job.num_output)
        self._owner.ended(job)

    # -------------------------------------------------------------------------------------------- admission

    def _queue(self, job: Job) -> None:
        self._num_queued += job.num_queued
        self._num_queued_prompts += job.num_queued > 0

    def _unqueue(self, job: Job) -> None:
        self._num_queued -= job.num_queued
        self._num_queued_prompts -= job.num_queued > 0

    def _admit(self, left: int) -> None:
        """Those that wait, in their order, up to the first one that does not fit."""
        while (job := self._first_waiting()) is not None:
            if left <= 0 and not (job.is_new and job.mode is Mode.REMOTE):
                return
            if not self._allocate(job):
                return
            if not self._park(job):
                self._prompts.append(job)
                self._queue(job)
                self._publish(job)
                if left > 0:
                    left -= self._compute(job, left)

    def _first_waiting(self) -> Job | None:
        """The first that waits for a place alone, if there is one. Others keep their places while the next block that
        they lack is computed or fetched for another request."""
        num_places = self._max_seqs - self._num_running
        if num_places <= 0 or not self._waiting:
            return None
        self._num_held_back = 0
        if not (self._prompts or self._parked):
            return self._waiting[0]
        next_names = self._next_names()
        for job in self._waiting:
            if self._num_held_back >= num_places:
                return None
            if not self._is_held_back(job, next_names):
                return job
            self._num_held_back += 1
        return None

    def _next_names(self) -> set[bytes]:
        """Of blocks that prompts under way complete next."""
        size = self._size
        places = [(job, job.num_computed // size) for job in self._prompts]
        return {job.names[number] for job, number in places if number < len(job.names)}

    def _is_held_back(self, job: Job, next_names: set[bytes]) -> bool:
        if job.mode is Mode.PREFILL or not self._blocks.is_cached:
            return False
        names = job.names[: (job.num_tokens - 1) // self._size]
        number = self._blocks.find(names)
        if number == len(names):
            return False
        if not job.is_new or job.mode is not Mode.REMOTE:
            return names[number] in next_names
        # Fetched for another one, up to so little that no prefill worker would be asked for the rest.
        for other in self._parked:
            if other.mode is Mode.REMOTE and number < len(other.names) and other.names[number] == names[number]:
                while number < min(len(names), len(other.names)) and other.names[number] == names[number]:
                    number += 1
                missing = job.num_asked - number * self._size
                return is_computed_in_place(missing, job.min_remote, self._size)
        return False

    def _park_newcomers(self) -> None:
        """Those at the head that ask a prefill worker, at any time."""
        if self._run is not None:
            self._take_blocks(self._step_at(self._clock.now))
        while (job := self._first_waiting()) is not None:
            if not job.is_new or job.mode is not Mode.REMOTE or not self._allocate(job):
                return
            if not self._park(job):
                self._prompts.append(job)
                self._queue(job)

    def _allocate(self, job: Job) -> bool:
        """Blocks for the first that waits, what is found of its beginning shared. False if there are too few."""
        blocks, size, num_tokens = self._blocks, self._size, job.num_tokens
        num_found = blocks.find(job.names[: (num_tokens - 1) // size])
        num_blocks = -(-num_tokens // size)
        if not blocks.allocate(num_blocks, job.names[:num_found]):
            return False
        self._waiting.remove(job)  # the first one, mostly
        self._unqueue(job)
        job.held = job.names[:num_found]
        job.num_blocks, job.num_named, job.num_computed = num_blocks, num_found, num_found * size
        self._rank += 1
        job.rank = self._rank
        if job.is_new:
            job.num_cached = min(job.num_computed, job.num_prompt)
        return True

    def _park(self, job: Job) -> bool:
        """False if it computes its prompt itself from here on."""
        is_new, job.is_new = job.is_new, False
        first, size = job.num_computed // self._size, self._size
        if not is_new or job.mode is Mode.LOCAL:
            job.mode = Mode.LOCAL if job.mode is Mode.REMOTE else job.mode
            return False
        if job.mode is Mode.PREFILL:
            stop = min(job.num_lendable, (job.num_prompt - 1) // size)
            if stop <= first:
                return False
            self._parked[job] = None
            self._owner.ask_loan(job, first, stop)
            return True
        is_split = job.num_asked < job.num_prompt
        num_asked = job.num_asked // size * size if is_split else job.num_prompt
        if is_computed_in_place(num_asked - first * size, job.min_remote, size):
            job.mode = Mode.LOCAL
            self._owner.needs_no_more(job)
            return False
        self._parked[job] = None
        self._owner.ask_prefill(job, first, num_asked // size if is_split else 0)
        return True

    def _hand_over_cached(self, job: Job) -> bool:
        """A part all of whose blocks are here waits for no turn."""
        num_blocks = job.num_prompt // self._size
        if not num_blocks or self._blocks.find(job.names[:num_blocks]) < num_blocks:
            return False
        self._blocks.allocate(num_blocks, job.names[:num_blocks])
        job.held, job.num_blocks, job.num_named = job.names[:num_blocks], num_blocks, num_blocks
        job.num_computed = job.num_cached = job.num_prompt
        job.is_new = False
        self._num_leases += 1
        self._publish(job)
        return True

    # ------------------------------------------------------------------------------------------------ blocks

    def _step_at(self, now: float) -> int:
        """The step that decodes make then."""
        return self._step if self._run is None else self._step + min(self._run.num_done(now), self._run.num_steps - 1)

    def _take_blocks(self, step: int) -> None:
        """Those that decodes need up to this step, of which there are enough."""
        if step < self._next_block_at:
            return
        size, num_taken, next_at = self._size, 0, NEVER
        for _, _, job in self._decodes:
            num_new = -(-(job.base + step) // size) - job.num_blocks
            if num_new > 0:
                job.num_computed = job.base + step - 1
                self._name(job)  # the one before it is full
                job.num_blocks += num_new
                num_taken += num_new
            next_at = min(next_at, job.num_blocks * size + 1 - job.base)
        self._next_block_at = next_at
        self._blocks.take(num_taken)
        self._report_blocks()

    def _take_blocks_of_step(self) -> bool:
        """Those of the next step. If there are too few, requests give theirs back, the last admitted one first. Returns
        whether any did."""
        step, size = self._step, self._size
        if step < self._next_block_at:
            return False
        lacking = [job for _, _, job in self._decodes if job.base + step > job.num_blocks * size]
        if len(lacking) <= self._blocks.num_available:
            self._take_blocks(step)
            return False
        going_on = sorted([job for _, _, job in self._decodes], key=_rank)
        can_lose = sorted([*going_on, *[job for job in self._prompts if job.mode is not Mode.PREFILL]], key=_rank)
        kept: set[Job] = set()
        gone: set[Job] = set()
        for job in going_on:
            if job in gone:
                continue
            while job.base + step > job.num_blocks * size and job not in gone:
                if self._blocks.num_available:
                    self._blocks.take(1)
                    job.num_blocks += 1
                    continue
                victim = next(one for one in reversed(can_lose) if one not in kept and one not in gone)
                gone.add(victim)
                self._preempt(victim)
            if job not in gone:
                kept.add(job)
        self._next_block_at = min([job.num_blocks * size + 1 - job.base for _, _, job in self._decodes], default=NEVER)
        return True

    def _preempt(self, job: Job) -> None:
        if job in self._prompts:
            self._prompts.remove(job)
            self._unqueue(job)
        else:
            self._decodes = [one for one in self._decodes if one[2] is not job]
            heapq.heapify(self._decodes)
            self._sum_bases -= job.base
            job.num_drawn = job.base + self._step - job.num_prompt
            job.num_computed = job.num_tokens - 1
            self._name(job)
        self._give_up(job)
        job.num_computed = 0
        job.num_preemptions += 1
        self._waiting.appendleft(job)
        self._queue(job)

    def _name(self, job: Job) -> None:
        """Makes the full blocks that are computed findable."""
        stop = min(job.num_computed // self._size, job.num_blocks)
        names = job.names
        for number in range(job.num_named, stop):
            if number == len(names):
                names.append(name_in_answer(job.chain, number))
            if self._blocks.name(names[number]):
                job.held.append(names[number])
        job.num_named = max(job.num_named, stop)

    def _give_up(self, job: Job) -> None:
        self._blocks.give_up(job.held, job.num_blocks - len(job.held))
        job.held = []
        job.num_blocks = job.num_named = 0

    def _report_blocks(self) -> None:
        blocks = self._blocks
        if not (blocks.stored or blocks.removed):
            return
        stored, removed = b"".join(blocks.stored), b"".join(blocks.removed)
        blocks.stored.clear()
        blocks.removed.clear()
        self._owner.report_blocks(self, stored, removed)


def _rank(job: Job) -> int:
    return job.rank
