"""The requests of a worker that do not decode: they wait for a place, compute their prompts, or wait for KV of another
worker. The order is that of arrival.

    waiting ──> computing, in chunks ──> (decodes, or its blocks are leased)
          └──> parked ──┘
"""

from __future__ import annotations

from collections import deque

from common.config import EngineSettings
from common.prefill_place import is_computed_in_place
from simulation.counted.fetches import Fetches
from simulation.counted.job import Job, Mode
from simulation.counted.job_blocks import JobBlocks
from simulation.counted.owner import Owner


class Prompts:
    def __init__(self, blocks: JobBlocks, settings: EngineSettings, owner: Owner) -> None:
        self.waiting: deque[Job] = deque()
        self.computing: list[Job] = []  # in the order of admission
        self.parked: dict[Job, None] = {}  # likewise
        self.fetches = Fetches(blocks)
        self.num_queued = 0  # prompt tokens of those that wait or are computed
        self.num_queued_prompts = 0
        self._num_held_back = 0  # of those that wait, at the last look for the first
        self._blocks = blocks
        self._size = blocks.size
        self._chunk = settings.chunk_size
        self._at_end = settings.announce == "end"
        self._owner = owner

    @property
    def num_held_back(self) -> int:
        """Of those that wait: they count as running."""
        return min(self._num_held_back, len(self.waiting))

    # --------------------------------------------------------------------------------------------- the queue

    def wait(self, job: Job) -> None:
        """It has come."""
        self.waiting.append(job)
        self._count(job)

    def wait_again(self, job: Job) -> None:
        """It was preempted: it is the next."""
        self.waiting.appendleft(job)
        self._count(job)

    def first_waiting(self, num_places: int) -> Job | None:
        """The first that waits for a place alone, if there is one. Others keep their places while the next block that
        they lack is computed or fetched for another request."""
        if not self.waiting or num_places <= 0:
            return None
        self._num_held_back = 0
        if not (self.computing or self.parked):
            return self.waiting[0]
        next_names = self._next_names()
        for job in self.waiting:
            if self._num_held_back >= num_places:
                return None
            if not self._is_held_back(job, next_names):
                return job
            self._num_held_back += 1
        return None

    def place(self, job: Job, rank: int) -> bool:
        """Gives one that waits its blocks. Returns False and changes nothing if there are too few."""
        before = job.num_queued
        if not self._blocks.allocate(job):
            return False
        self.waiting.remove(job)  # the first one, mostly
        self.num_queued -= before
        self.num_queued_prompts -= before > 0
        job.rank = rank
        if job.is_new:
            job.num_cached = min(job.num_computed, job.num_prompt)
        return True

    def compute(self, job: Job) -> None:
        """It computes its prompt from here on."""
        self.computing.append(job)
        self._count(job)

    def preempt(self, job: Job) -> None:
        """Its prompt is not computed any more."""
        self.computing.remove(job)
        self.num_queued -= job.num_queued
        self.num_queued_prompts -= job.num_queued > 0

    def advance(self, job: Job, num_new: int) -> None:
        """Tokens of one of `computing` are computed."""
        before = job.num_queued
        job.num_computed += num_new
        left = job.num_queued
        self.num_queued += left - before
        self.num_queued_prompts -= before > 0 and not left
        self._blocks.name(job)

    def _count(self, job: Job) -> None:
        num = job.num_queued
        self.num_queued += num
        self.num_queued_prompts += num > 0

    # ----------------------------------------------------------------------------------------- other workers

    def park(self, job: Job) -> bool:
        """Parks one that just got its blocks, if it is new and its KV comes from another worker. False if it computes
        its prompt itself from here on."""
        is_new, job.is_new = job.is_new, False
        first, size = job.num_computed // self._size, self._size
        if not is_new or job.mode is Mode.LOCAL:
            job.mode = Mode.LOCAL if job.mode is Mode.REMOTE else job.mode
            return False
        fetches, limit = self.fetches, (job.num_prompt - 1) // size
        job.ask_from = ask_from = fetches.known_until(job, first, limit)
        if job.mode is Mode.PREFILL:
            stop = max(ask_from, min(job.num_lendable, limit))
            if stop <= first:
                return False
            self.parked[job] = None
            fetches.join(job, ask_from, stop)
            if stop > ask_from:
                self._owner.ask_loan(job, ask_from, stop)
            else:
                job.num_arrived = ask_from
            return True
        if not self.asks_worker(job, ask_from):
            job.mode = Mode.LOCAL
            self._owner.needs_no_more(job)
            return False
        self.parked[job] = None
        num_asked = job.num_asked // size
        fetches.join(job, ask_from, num_asked)
        self._owner.ask_prefill(job, ask_from, num_asked if job.num_asked < job.num_prompt else 0)
        return True

    def publish(self, job: Job) -> None:
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

    # ---------------------------------------------------------------------------- blocks of several requests

    def next_chunk(self, job: Job, left: int, chunks: list[tuple[Job, int]]) -> int:
        """How many tokens of its prompt the next step computes, beside `chunks` of others, at most `left`: up to the
        first block that another request computes in this step."""
        num = min(job.num_tokens - job.num_computed, self._chunk, left)
        if not chunks:
            return num
        size, start = self._size, job.num_computed
        computed: set[bytes] = set()
        for other, num_new in chunks:
            computed.update(other.names[other.num_computed // size : (other.num_computed + num_new) // size])
        last = min((start + num - 1) // size + 1, (job.num_tokens - 1) // size, len(job.names))
        for number in range(start // size, last):
            if job.names[number] in computed:
                return max(number * size - start, 0)
        return num

    def _next_names(self) -> set[bytes]:
        """Of blocks that prompts under way complete next."""
        size = self._size
        places = [(job, job.num_computed // size) for job in self.computing]
        return {job.names[number] for job, number in places if number < len(job.names)}

    def _is_held_back(self, job: Job, next_names: set[bytes]) -> bool:
        counts = self._blocks.counts
        if job.mode is Mode.PREFILL or not counts.is_cached:
            return False
        names = job.names[: (job.num_tokens - 1) // self._size]
        number = counts.find(names)
        if number == len(names):
            return False
        if job.is_new and self.parked:
            known = self.fetches.known_until(job, number, len(names))
            if known > number and not self.asks_worker(job, known):
                return True
        return names[number] in next_names and not (job.is_new and job.mode is Mode.REMOTE)

    def asks_worker(self, job: Job, ask_from: int) -> bool:
        """Whether a prefill worker has to compute its KV from block `ask_from` on, if all before is known."""
        size = self._size
        num_asked = job.num_asked if job.num_asked == job.num_prompt else job.num_asked // size * size
        return job.mode is Mode.REMOTE and not is_computed_in_place(num_asked - ask_from * size, job.min_remote, size)
