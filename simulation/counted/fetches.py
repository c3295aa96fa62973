"""Blocks on their way to a worker: each is fetched once, for the first job that waits for it. Later jobs follow that
one, as in `engine.remote_kv.shared_fetches`.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulation.counted.job import Job
from simulation.counted.job_blocks import JobBlocks


class Fetches:
    def __init__(self, blocks: JobBlocks) -> None:
        self._blocks = blocks
        self._leaders: dict[bytes, Job] = {}  # by name of the block
        self._followers: dict[Job, list[Job]] = {}  # of a leader

    def known_until(self, job: Job, start: int, stop: int) -> int:
        """End of the run of blocks from `start` that are here or on their way; `stop` at most."""
        if leaders := self._leaders:
            counts, names = self._blocks.counts, job.names
            while start < stop and (names[start] in leaders or names[start] in counts):
                start += 1
        return start

    def join(self, job: Job, ask_from: int, stop: int) -> None:
        """The job's wait begins: it follows those for whom its blocks before `ask_from` are fetched, and leads those up
        to `stop`."""
        if not self._blocks.counts.is_cached:
            return
        names, leaders = job.names, self._leaders
        if (first := job.num_computed // self._blocks.size) < ask_from:
            followed = {leaders[name]: None for name in names[first:ask_from] if name in leaders}
            for leader in followed:
                self._followers.setdefault(leader, []).append(job)
            job.num_followed = len(followed)
        for name in names[ask_from:stop]:
            if name not in leaders:
                leaders[name] = job

    def leave(self, job: Job, *, has_come: bool) -> Sequence[Job]:
        """The job waits no more. `has_come`: its blocks are here, and found by name. Returns the jobs that wait for
        nothing more by this."""
        leaders = self._leaders
        for name in job.names[job.ask_from :]:
            if leaders.get(name) is job:
                del leaders[name]
        if job.num_followed:
            for followers in self._followers.values():
                if job in followers:
                    followers.remove(job)
        if job not in self._followers:
            return ()
        free: list[Job] = []
        for follower in self._followers.pop(job):
            follower.num_followed -= 1
            if has_come:
                follower.num_computed += self._blocks.adopt(follower) * self._blocks.size
                self._blocks.name(follower)
            if not follower.num_followed and follower.num_arrived is not None:
                free.append(follower)
        return free
