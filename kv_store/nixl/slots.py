"""Which slot of a producer's staging pool holds which published block, and until when. Pure bookkeeping.

If peers cannot reach the producer's own memory, it copies each block that it publishes into a slot of host memory,
and they read that. The pool is smaller than the cache, so slots are given back early: when every rank of the consumer
that needs the block has reported to have read it, or when the job's lease ends, whichever comes first.

A slot goes by *tickets*, a new one for each block that it holds in turn; ticket modulo `num_slots` is the slot. So a
report that comes late is never taken for one about the block that is in the slot now. A consumer that reads late gets
other bytes: references to staged blocks always carry checksums.
"""

from __future__ import annotations

import threading
from collections import deque


class ServedSlots:
    """Any thread may call any method."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._lock = threading.Lock()
        self._free = deque(range(num_slots))  # the tickets to be given out next
        self._readers: dict[int, set[int]] = {}  # ticket that is held: ranks of the consumer that have read it
        self._jobs: dict[int, set[int]] = {}  # tickets held, by job
        self._job_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, job_id: int, num_blocks: int) -> list[int]:
        """Tickets for `num_blocks` blocks of a job. Raises `IndexError` if fewer slots are free."""
        with self._lock:
            if num_blocks > len(self._free):
                raise IndexError(f"{num_blocks} of {len(self._free)} free slots")
            tickets = [self._free.popleft() for _ in range(num_blocks)]
            for ticket in tickets:
                self._readers[ticket] = set()
                self._job_of[ticket] = job_id
            self._jobs.setdefault(job_id, set()).update(tickets)
            return tickets

    def report(self, ticket: int, rank: int, num_readers: int) -> None:
        """Rank `rank` of a consumer, of which `num_readers` ranks need the block, has read it."""
        with self._lock:
            readers = self._readers.get(ticket)
            if readers is None:
                return  # its lease has ended
            readers.add(rank)
            if len(readers) >= num_readers:
                self._give_back(ticket)

    def release(self, job_id: int) -> None:
        """The lease on what the job published has ended."""
        with self._lock:
            for ticket in list(self._jobs.get(job_id, ())):
                self._give_back(ticket)

    def _give_back(self, ticket: int) -> None:
        job_id = self._job_of.pop(ticket)
        del self._readers[ticket]
        self._jobs[job_id].discard(ticket)
        if not self._jobs[job_id]:
            del self._jobs[job_id]
        self._free.append(ticket + self.num_slots)
