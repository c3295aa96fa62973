"""The requests of a worker that draw a token in each step.

Each is (the step in which it ends, its context less the steps made before), so that a step changes none of them.
"""

from __future__ import annotations

import heapq

from simulation.counted.job import Job
from simulation.counted.job_blocks import JobBlocks

NEVER = 2**62  # steps


class Decodes:
    def __init__(self, blocks: JobBlocks) -> None:
        self.step = 0  # steps made before the run or step under way
        self.next_block_at = NEVER  # none needs a further block before this step
        self._blocks = blocks
        self._size = blocks.size
        self.ending: list[tuple[int, int, Job]] = []  # all of them, a heap: the step after which it ends, rank
        self._sum_bases = 0

    @property
    def jobs(self) -> list[Job]:
        return [job for _, _, job in self.ending]

    @property
    def context(self) -> int:
        """Tokens that they attend to in the next step, together."""
        return self._sum_bases + len(self.ending) * self.step

    @property
    def longest_context(self) -> int:
        return max([job.base for _, _, job in self.ending]) + self.step if self.ending else 0

    @property
    def num_steps_to_end(self) -> int:
        """Until the first one ends."""
        return self.ending[0][0] - self.step

    def join(self, job: Job) -> None:
        """From the next step on."""
        step = self.step
        job.base = base = job.num_tokens - step
        self._sum_bases += base
        heapq.heappush(self.ending, (step + job.num_output - job.num_drawn, job.rank, job))
        needs_at = job.num_blocks * self._size + 1 - base
        if needs_at < self.next_block_at:
            self.next_block_at = needs_at

    def pop_ended(self) -> list[Job]:
        """Takes those out that have drawn their last token."""
        step, ending, ended = self.step, self.ending, list[Job]()
        while ending and ending[0][0] <= step:
            job = heapq.heappop(ending)[2]
            self._sum_bases -= job.base
            job.num_drawn = job.num_output
            job.num_computed = job.num_tokens - 1
            ended.append(job)
        return ended

    def preempt(self, job: Job) -> None:
        """Takes it out before its end."""
        self.ending = [one for one in self.ending if one[2] is not job]
        heapq.heapify(self.ending)
        self._sum_bases -= job.base
        job.num_drawn = job.base + self.step - job.num_prompt
        job.num_computed = job.num_tokens - 1

    # ------------------------------------------------------------------------------- blocks that they need

    def has_blocks_for(self, num_steps: int) -> bool:
        """Whether so many steps surely have the blocks that they need."""
        return self._blocks.counts.num_available // len(self.ending) * self._size >= num_steps

    def steps_with_blocks(self, step: int) -> int:
        """How many steps from `step` on have the blocks that they need."""
        num_available, size = self._blocks.counts.num_available, self._size
        if num_available >= len(self.ending):
            return num_available // len(self.ending) * size
        lacking = sorted([job.num_blocks * size + 1 - job.base for _, _, job in self.ending])
        return max(lacking[num_available] - step, 0)

    def lacks_block(self, job: Job) -> bool:
        """Whether it needs a further one for the next step."""
        return job.base + self.step > job.num_blocks * self._size

    def take_blocks(self, step: int) -> None:
        """Those that are needed up to this step, of which there are enough."""
        if step < self.next_block_at:
            return
        size, num_taken, next_at = self._size, 0, NEVER
        for _, _, job in self.ending:
            num_new = -(-(job.base + step) // size) - job.num_blocks
            if num_new > 0:
                job.num_computed = job.base + step - 1
                self._blocks.name(job)  # the one before it is full
                job.num_blocks += num_new
                num_taken += num_new
            next_at = min(next_at, job.num_blocks * size + 1 - job.base)
        self.next_block_at = next_at
        self._blocks.counts.take(num_taken)

    def find_next_block(self) -> None:
        """After some were taken or given up by other ways."""
        size = self._size
        self.next_block_at = min([job.num_blocks * size + 1 - job.base for _, _, job in self.ending], default=NEVER)
