"""A worker as plain numbers: what `simulation.worker` does with an engine, without a token or a block.

Decodes alone go on for as many steps as nobody ends or joins, in the sum of their times: a run, which is one event. A
step with chunks of prompts is one event, too.

The order is that of arrival (`fcfs`). Other than in an engine, news of blocks reach the router at once, and the blocks
of a handoff are found by others once all of them have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from common.config import EngineSettings
from common.types import SLACKS_S, WorkerLoad, WorkerRole
from engine.scheduling.room import Room
from simulation.clock import VirtualClock
from simulation.counted.decodes import Decodes
from simulation.counted.job import Job, Mode
from simulation.counted.job_blocks import JobBlocks
from simulation.counted.owner import Owner
from simulation.counted.prompts import Prompts
from simulation.counted.router import CountedRouter, Reports
from simulation.counted.under_way import UnderWay
from simulation.step_times import Run, StepTimes


class CountedWorker:
    def __init__(
        self,
        address: str,
        role: WorkerRole,
        settings: EngineSettings,
        times: StepTimes,
        clock: VirtualClock,
        router: CountedRouter,
        owner: Owner,
        *,
        num_blocks: int,
    ) -> None:
        """`router`: hears when the load changes."""
        self.address = address
        self.role = role
        self.reports = Reports()
        self._size = settings.block_size
        self._max_seqs = settings.max_num_seqs
        self._max_tokens = settings.max_num_batched_tokens
        self._slacks = () if settings.queue_policy == "fcfs" else (0,) * len(SLACKS_S)
        self._clock = clock
        self._router = router
        self._owner = owner
        self._blocks = JobBlocks(num_blocks, settings.block_size, is_cached=settings.enable_prefix_caching)
        self._counts = self._blocks.counts
        self._room = Room(settings.block_size)
        self._prompts = Prompts(self._blocks, settings, owner)
        self._decodes = Decodes(self._blocks)
        self._joining: list[Job] = []  # decode from the next step on
        self._rank = 0
        self._num_leases = 0
        self.under_way = UnderWay(self._decodes, times)
        self._number = 0  # of what is under way: tells the end of one that was cut short
        self._is_turn_due = False

    # ------------------------------------------------------------------------------------------ what comes

    def add(self, job: Job) -> None:
        """A request comes."""
        self._router.changing(self, self._clock.now)
        self.reports.newcomers.append(job.key)
        if job.is_part and self._hand_over_cached(job):
            return
        self._prompts.wait(job)
        self._park_newcomers()
        self._go_on()

    def release(self, job: Job) -> None:
        """A prefill's decode worker needs its blocks no more."""
        self._router.changing(self, self._clock.now)
        self._num_leases -= 1
        self._blocks.give_up(job)
        self._go_on()

    def hear(self) -> None:
        """A message comes that moves no request on. An idle worker looks all the same whether it has to report its
        load; while it computes, each step does that."""
        if self.under_way.run is None and not self.under_way.chunks:
            self._router.changing(self, self._clock.now)
            self._go_on()

    def settle(self, job: Job, num_blocks: int) -> None:
        """The first `num_blocks` blocks of a parked request are there, as far as they were asked for: all that it waits
        for, and the first token too, unless the prompt is split."""
        self._router.changing(self, self._clock.now)
        job.num_arrived = num_blocks
        if not job.num_followed:
            self._unpark(job, num_blocks)
        self._report_blocks()
        self._go_on()

    def _unpark(self, job: Job, num_blocks: int) -> None:
        """Its wait is over."""
        del self._prompts.parked[job]
        if job.num_computed // self._size < job.ask_from:  # what it followed has not come: it has to compute that
            if job.mode is Mode.PREFILL:
                job.num_cached = job.num_computed
        elif job.mode is Mode.PREFILL:  # what was lent
            job.num_computed = job.num_cached = num_blocks * self._size
        elif job.num_drawn:
            job.num_computed = job.num_prompt
        else:
            job.num_computed = num_blocks * self._size
        self._blocks.name(job)
        if job.mode is Mode.REMOTE:
            job.mode = Mode.LOCAL
            self._owner.needs_no_more(job)
        if job.num_computed < job.num_prompt or not job.num_drawn:
            self._prompts.compute(job)
            self._prompts.publish(job)
        else:
            self._joining.append(job)
        self._unpark_all(self._prompts.fetches.leave(job, has_come=True))

    def _unpark_all(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._unpark(job, job.num_arrived or 0)

    def end_parked(self, job: Job) -> None:
        """The first token of a parked request is its last."""
        self._router.changing(self, self._clock.now)
        del self._prompts.parked[job]
        job.num_computed = 0  # nothing of it has arrived
        self._owner.needs_no_more(job)
        free = self._prompts.fetches.leave(job, has_come=False)
        self._end(job)
        self._unpark_all(free)
        self._go_on()

    # ----------------------------------------------------------------------------------------- what it says

    @property
    def busy_s(self) -> float:
        return self.under_way.busy_s

    @property
    def num_steps(self) -> int:
        return self.under_way.num_steps

    @property
    def load(self) -> WorkerLoad:
        return self.load_at(self._clock.now)

    def load_at(self, time: float) -> WorkerLoad:
        """`time`: now, or a moment since which nothing has changed but that decodes went on."""
        self._catch_up(time)
        counts, prompts = self._counts, self._prompts
        num_owned, num_cached = counts.num_owned, len(counts.idle)
        num_waiting = len(prompts.waiting)
        num_held_back = prompts.num_held_back if num_waiting else 0
        num_running = self._num_running
        return WorkerLoad(
            num_requests_running=num_running + num_held_back,
            num_requests_waiting=num_waiting - num_held_back,
            num_queued_prompt_tokens=prompts.num_queued,
            num_queued_prompts=prompts.num_queued_prompts,
            queued_by_slack=self._slacks,
            num_blocks=counts.num_blocks,
            num_free_blocks=counts.num_blocks - num_owned - num_cached,
            num_cached_blocks=num_cached,
            num_leases=self._num_leases,
            room_after=() if self._has_room(num_running) else self._room_after(),
        )

    def _has_room(self, num_running: int) -> bool:
        """For a newcomer, as `Scheduler.room_after` has it."""
        if num_running >= self._max_seqs:
            return False
        waiting = self._prompts.waiting
        return not waiting or -(-waiting[0].num_tokens // self._size) <= self._counts.num_available

    def _room_after(self) -> tuple[int, ...]:
        prompts = self._prompts
        running = [*self._decodes.jobs, *self._joining, *prompts.computing, *prompts.parked]
        left = [
            1 if job.mode is Mode.PREFILL else self._room.num_left(job.num_blocks, job.num_prompt, job.num_output)
            for job in running
        ]
        return self._room.after_tokens(left, len(prompts.waiting) - prompts.num_held_back)

    def check_integrity(self) -> list[str]:
        """What is wrong with its blocks or queues once all requests have ended; empty if nothing is."""
        found = {
            "blocks are owned": self._counts.num_owned,
            "requests wait": len(self._prompts.waiting),
            "requests run": self._num_running,
            "prompt tokens are queued": self._prompts.num_queued,
            "prompts are queued": self._prompts.num_queued_prompts,
            "prefills are leased": self._num_leases,
        }
        return [f"{self.address}: {num} {what}" for what, num in found.items() if num]

    # --------------------------------------------------------------------------------------- steps and runs

    @property
    def _num_running(self) -> int:
        prompts = self._prompts
        return len(self._decodes.ending) + len(self._joining) + len(prompts.computing) + len(prompts.parked)

    def _go_on(self) -> None:
        """With a step if none is under way, once all that comes at this moment is here; else a run ends with the step
        under way if the next one has further requests. The last thing that a caller does."""
        if (run := self.under_way.run) is not None:
            self._shorten(run)
        elif not self.under_way.chunks and not self._is_turn_due:
            if not (self._joining or self._prompts.computing or self._prompts.waiting):
                self._report_blocks()
                self._router.idle(self, self._clock.now)
                return
            if self._clock.is_last_of_moment:
                self._turn()
            else:
                self._is_turn_due = True
                self._clock.at(self._clock.now, self._turn)

    def _shorten(self, run: Run) -> None:
        """Ends the run sooner if others join, or a newcomer took blocks that it needs."""
        decodes, now = self._decodes, self._clock.now
        if self._joining or self._prompts.computing or self._may_admit():
            limit = run.num_done(now) + 1
        elif decodes.has_blocks_for(run.num_steps):
            return
        else:
            num_done = run.num_done(now)
            if decodes.has_blocks_for(run.num_steps - num_done):
                return
            self._catch_up(now)  # a newcomer may have taken some
            limit = num_done + 1 + decodes.steps_with_blocks(decodes.step + num_done + 1)
        if limit < run.num_steps:
            run.shorten(limit)
            self._await(run.end)

    def _may_admit(self) -> bool:
        """Whether the first that waits may have a place in the next step."""
        job = self._first_waiting()
        return job is not None and self._blocks.missing(job) <= 0

    def _first_waiting(self) -> Job | None:
        prompts = self._prompts
        return prompts.first_waiting(self._max_seqs - self._num_running) if prompts.waiting else None

    def _await(self, end: float) -> None:
        self._number += 1
        self._clock.at(end, partial(self._ended, self._number))

    def _turn(self) -> None:
        """Begins a step or a run, if there is something to compute."""
        self._is_turn_due = False
        if self.under_way.run is not None or self.under_way.chunks:
            return
        decodes = self._decodes
        for job in self._joining:
            decodes.join(job)
        self._joining.clear()
        has_preempted = decodes.step >= decodes.next_block_at and self._take_blocks_of_step()
        left = self._max_tokens - len(decodes.ending)
        for job in self._prompts.computing:
            if left <= 0:
                break
            left -= self._compute(job, left)
        if self._prompts.waiting and not has_preempted:
            self._admit(left)
        self._report_blocks()
        if self.under_way.chunks:
            self._await(self.under_way.begin_step(self._clock.now))
        elif decodes.ending:
            self._await(self.under_way.begin_run(self._clock.now))
        else:
            self._router.idle(self, self._clock.now)

    def _compute(self, job: Job, left: int) -> int:
        """A chunk of the prompt, in the next step. Returns its tokens."""
        if num_adopted := self._blocks.adopt(job):
            self._prompts.advance(job, num_adopted * self._size)
            self._prompts.publish(job)
        num = self._prompts.next_chunk(job, left, self.under_way.chunks)
        if num > 0:
            self.under_way.chunks.append((job, num))
        return num

    def _ended(self, number: int) -> None:
        """The run or step under way is over, unless it was cut short."""
        if number != self._number:
            return
        self._router.changing(self, self._clock.now)
        if (run := self.under_way.run) is not None:
            self._take_blocks(self._decodes.step + run.num_steps - 1)
        if chunks := self.under_way.end():
            self._end_chunks(chunks)
        for job in self._decodes.pop_ended():
            self._end(job)
        self._turn()

    def _end_chunks(self, chunks: list[tuple[Job, int]]) -> None:
        prompts = self._prompts
        for job, num in chunks:
            prompts.advance(job, num)
            if job.num_computed < job.num_tokens:
                self._prompts.publish(job)
                continue
            prompts.computing.remove(job)
            if job.mode is Mode.PREFILL:
                self._num_leases += 1
                self._prompts.publish(job)
                continue
            job.num_drawn += 1
            if job.num_drawn == 1:
                self._owner.first_token(job)
            if job.num_drawn == job.num_output:
                self._end(job)
            else:
                self._joining.append(job)

    def _end(self, job: Job) -> None:
        self._blocks.name(job)
        self._blocks.give_up(job)
        self._room.ended(job.num_output)
        self._owner.ended(job)

    # -------------------------------------------------------------------------------------------- admission

    def _admit(self, left: int) -> None:
        """Those that wait, in their order, up to the first one that does not fit."""
        prompts = self._prompts
        while (job := self._first_waiting()) is not None:
            if left <= 0 and not (job.is_new and job.mode is Mode.REMOTE):
                return
            if not self._place(job):
                return
            if not self._prompts.park(job):
                prompts.compute(job)
                self._prompts.publish(job)
                if left > 0:
                    left -= self._compute(job, left)

    def _place(self, job: Job) -> bool:
        if not self._prompts.place(job, self._rank + 1):
            return False
        self._rank += 1
        return True

    def _park_newcomers(self) -> None:
        """Those at the head that ask a prefill worker, at any time."""
        self._catch_up(self._clock.now)
        while (job := self._first_waiting()) is not None:
            if not job.is_new or job.mode is not Mode.REMOTE or not self._place(job):
                return
            if not self._prompts.park(job):
                self._prompts.compute(job)

    def _hand_over_cached(self, job: Job) -> bool:
        """A part all of whose blocks are here waits for no turn."""
        if not self._blocks.allocate_cached(job):
            return False
        job.is_new = False
        self._num_leases += 1
        self._prompts.publish(job)
        return True

    # ------------------------------------------------------------------------------------------------ blocks

    def _catch_up(self, time: float) -> None:
        """Takes the blocks that decodes of the run under way have needed until then."""
        run, decodes = self.under_way.run, self._decodes
        if run is not None and decodes.next_block_at < decodes.step + run.num_steps:
            self._take_blocks(decodes.step + min(run.num_done(time), run.num_steps - 1))

    def _take_blocks(self, step: int) -> None:
        if step >= self._decodes.next_block_at:
            self._decodes.take_blocks(step)
            self._report_blocks()

    def _take_blocks_of_step(self) -> bool:
        """Those of the next step. If there are too few, requests give theirs back, the last admitted one first. Returns
        whether any did."""
        decodes, counts = self._decodes, self._counts
        going_on = decodes.jobs
        if sum([decodes.lacks_block(job) for job in going_on]) <= counts.num_available:
            self._take_blocks(decodes.step)
            return False
        going_on.sort(key=_rank)
        computing = [job for job in self._prompts.computing if job.mode is not Mode.PREFILL]
        can_lose = sorted([*going_on, *computing], key=_rank)
        kept: set[Job] = set()
        gone: set[Job] = set()
        for job in going_on:
            if job in gone:
                continue
            while decodes.lacks_block(job) and job not in gone:
                if counts.num_available:
                    counts.take(1)
                    job.num_blocks += 1
                    continue
                victim = next(one for one in reversed(can_lose) if one not in kept and one not in gone)
                gone.add(victim)
                self._preempt(victim)
            if job not in gone:
                kept.add(job)
        decodes.find_next_block()
        return True

    def _preempt(self, job: Job) -> None:
        if job in self._prompts.computing:
            self._prompts.preempt(job)
        else:
            self._decodes.preempt(job)
            self._blocks.name(job)
        self._blocks.give_up(job)
        job.num_computed = 0
        job.num_preemptions += 1
        self._prompts.wait_again(job)

    def _report_blocks(self) -> None:
        counts = self._counts
        if not (counts.stored or counts.removed):
            return
        stored, removed = b"".join(counts.stored), b"".join(counts.removed)
        counts.stored.clear()
        counts.removed.clear()
        self._owner.report_blocks(self, stored, removed)


def _rank(job: Job) -> int:
    return job.rank
