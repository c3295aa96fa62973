"""Work of several jobs, handed out in turns, so that a long transfer does not hold up a short one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Job = TypeVar("Job")
Item = TypeVar("Item")


class FairQueue(Generic[Job, Item]):
    """Round-robin over jobs: each turn hands out one slice of a job's items, in their order.

        put(A, a1 a2 a3 a4)  put(B, b1)      take(2) -> A: a1 a2      take(2) -> B: b1      take(2) -> A: a3 a4

    Any thread may put and take.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Job, deque[Item]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, job: Job, items: Iterable[Item]) -> None:
        """Queues a job's items. Does nothing if there are none, or if the queue is closed."""
        queued = deque(items)
        if queued:
            self._append(job, queued)

    def put_turn(self, job: Job) -> None:
        """Queues one turn of `job`, without items."""
        self._append(job, deque())

    def _append(self, job: Job, queued: deque[Item]) -> None:
        with self._changed:
            if not self._is_closed:
                self._jobs.append((job, queued))
                # All: two takers may both have room for parts of this job.
                self._changed.notify_all()

    def take(
        self,
        limit: int,
        timeout_s: float | None = None,
        accepts: Callable[[Job], bool] = lambda _: True,
        spare: int = 0,
    ) -> tuple[Job, list[Item]] | None:
        """Waits for a job that `accepts` allows, and takes up to `limit` of its items, or `spare` more if those are its
        last ones. Returns None once the queue is closed, or after `timeout_s`. Asks `accepts` again when something is
        put, and after `recheck`."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._is_closed or self._next(accepts) is not None, timeout_s)
            position = self._next(accepts)
            if self._is_closed or not found or position is None:
                return None
            job, queued = self._jobs[position]
            del self._jobs[position]
            size = len(queued) if len(queued) <= limit + spare else limit
            items = [queued.popleft() for _ in range(size)]
            if queued:
                self._jobs.append((job, queued))
            return job, items

    def drop_all(self) -> list[tuple[Job, list[Item]]]:
        """Takes out all that is queued."""
        with self._changed:
            dropped = [(job, list(queued)) for job, queued in self._jobs]
            self._jobs.clear()
            return dropped

    def recheck(self) -> None:
        """Tells `take` that the answers of `accepts` may have changed."""
        with self._changed:
            self._changed.notify_all()

    def _next(self, accepts: Callable[[Job], bool]) -> int | None:
        return next((position for position, (job, _) in enumerate(self._jobs) if accepts(job)), None)

    @property
    def num_jobs(self) -> int:
        """How many jobs wait for their turn."""
        return len(self._jobs)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Drops what is queued and ends every `take`."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
