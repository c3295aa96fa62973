"""Which blocks each job of a worker owns, and under which names they are found."""

from __future__ import annotations

from simulation.counted.block_counts import BlockCounts
from simulation.counted.block_names import name_in_answer
from simulation.counted.job import Job


class JobBlocks:
    def __init__(self, num_blocks: int, size: int, *, is_cached: bool) -> None:
        """`size` in tokens. `is_cached`: blocks are found by their names."""
        self.size = size
        self.counts = BlockCounts(num_blocks, is_cached=is_cached)

    def missing(self, job: Job) -> int:
        """Blocks by which those that are free are too few for it; 0 or less: there is room."""
        size, counts = self.size, self.counts
        if (num_lacking := -(-job.num_tokens // size) - counts.num_available) <= 0:
            return num_lacking
        return num_lacking - counts.find(job.names[: (job.num_tokens - 1) // size])

    def allocate(self, job: Job) -> bool:
        """Blocks for all of its tokens, what is found of its beginning shared. Returns False and changes nothing if
        there are too few."""
        size, counts, num_tokens = self.size, self.counts, job.num_tokens
        num_found = counts.find(job.names[: (num_tokens - 1) // size])
        num_blocks = -(-num_tokens // size)
        held = job.names[:num_found]
        if not counts.allocate(num_blocks, held):
            return False
        job.held = held
        job.num_blocks, job.num_named, job.num_computed = num_blocks, num_found, num_found * size
        return True

    def allocate_cached(self, job: Job) -> bool:
        """The blocks of its prompt, if all of them are found. Returns False and changes nothing if not."""
        num_blocks = job.num_prompt // self.size
        if not num_blocks or self.counts.find(job.names[:num_blocks]) < num_blocks:
            return False
        self.counts.allocate(num_blocks, job.names[:num_blocks])
        job.held, job.num_blocks, job.num_named = job.names[:num_blocks], num_blocks, num_blocks
        job.num_computed = job.num_cached = job.num_prompt
        return True

    def adopt(self, job: Job) -> int:
        """Takes over blocks that another job has computed by now, in place of those that it would compute next. Returns
        how many."""
        counts, size = self.counts, self.size
        if job.num_computed % size:
            return 0
        first, names = job.num_computed // size, job.names
        number, stop = first, min((job.num_tokens - 1) // size, len(names))
        while number < stop and names[number] in counts:
            counts.share(names[number])
            counts.give_up((), 1)
            job.held.append(names[number])
            number += 1
        return number - first

    def name(self, job: Job) -> None:
        """Makes its full blocks that are computed findable."""
        stop = job.num_computed // self.size
        if stop > job.num_blocks:
            stop = job.num_blocks
        if stop <= job.num_named:
            return
        names = job.names
        for number in range(job.num_named, stop):
            if number == len(names):
                names.append(name_in_answer(job.chain, number))
            if self.counts.name(names[number]):
                job.held.append(names[number])
        job.num_named = stop

    def give_up(self, job: Job) -> None:
        self.counts.give_up(job.held, job.num_blocks - len(job.held))
        job.held = []
        job.num_blocks = job.num_named = 0
