"""Lookups in a store that may answer late or never. The engine's thread only queues them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common import metrics
from kv_store.base import Lookup
from kv_store.failures import Failures

log = logging.getLogger(__name__)

_HANGS = "the store hangs"

LookUp = Callable[[Sequence[bytes], float], tuple[int, str | None]]
"""Returns (leading blocks found by a deadline in time.monotonic(), why there may be more). The second is None if the
store lacks the next block. Waits for the store."""


@dataclass(slots=True, frozen=True, eq=False)
class _Question:
    block_hashes: Sequence[bytes]
    deadline: float  # time.monotonic(); what `LookUp` found by then is the answer
    give_up: float  # the answer is 0 if it has not returned by then
    lookup: Lookup = field(default_factory=Lookup)

    @property
    def is_answered(self) -> bool:
        return self.lookup.num_blocks is not None

    def answer(self, num_blocks: int, failure: str | None) -> None:
        self.lookup.is_certain = failure is None
        self.lookup.num_blocks = num_blocks  # last: it says that the answer is there


class Lookups:
    """One thread looks up, in the order of arrival. While it hangs, another thread answers.

    Each lookup is answered within twice its time, with 0 if the store hangs. While the store still hangs, further
    lookups are answered with 0 at once.
    """

    def __init__(self, look_up: LookUp, failure: str) -> None:
        """`failure` is logged for lookups that failed, see `Failures`."""
        self._look_up = look_up
        self._failures = Failures(failure, "num_lookups")
        self._lock = threading.Lock()
        self._is_queued = threading.Condition(self._lock)
        self._is_begun = threading.Condition(self._lock)
        self._queued: deque[_Question] = deque()
        self._current: _Question | None = None  # with the thread that looks up
        self._is_closed = False

    def run(self, wake: Callable[[], None]) -> list[threading.Thread]:
        """Starts the threads, which call `wake` after each answer; they end after `close`."""
        threads = [
            threading.Thread(target=self._run, name="kv-lookup", args=(wake,), daemon=True),
            threading.Thread(target=self._watch, name="kv-lookup-watch", args=(wake,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        return threads

    def start(self, block_hashes: Sequence[bytes], timeout_s: float) -> Lookup:
        """Does what `KVConnector.start_lookup` does. `timeout_s` includes the wait for earlier lookups, and must be the
        same in each call."""
        now = time.monotonic()
        job = _Question(block_hashes, now + timeout_s, now + 2 * timeout_s)
        with self._lock:
            if self._current is None or not self._current.is_answered:
                self._queued.append(job)
                self._is_queued.notify()
                return job.lookup
            job.answer(0, _HANGS)
        self._report(_HANGS)
        return job.lookup

    def close(self) -> None:
        """Ends the threads, once the lookup under way has returned. What is queued gets no answer."""
        with self._lock:
            self._is_closed = True
            self._is_queued.notify()
            self._is_begun.notify()

    def _run(self, wake: Callable[[], None]) -> None:
        while (job := self._next()) is not None:
            try:
                if time.monotonic() < job.deadline:
                    num_blocks, failure = self._look_up(job.block_hashes, job.deadline)
                else:
                    num_blocks, failure = 0, "the lookups before it took all the time"
            except Exception as error:  # somebody waits for the answer
                log.exception("lookup failed")
                num_blocks, failure = 0, f"{type(error).__name__}: {error}"
            with self._lock:
                self._current = None
                if job.is_answered:
                    continue
                job.answer(num_blocks, failure)
            self._report(failure)
            wake()

    def _next(self) -> _Question | None:
        """None once closed."""
        with self._lock:
            self._is_queued.wait_for(lambda: self._queued or self._is_closed)
            if self._is_closed:
                return None
            self._current = self._queued.popleft()
            self._is_begun.notify()
            return self._current

    def _watch(self, wake: Callable[[], None]) -> None:
        while (hung := self._hung()) is not None:
            for _ in hung:
                self._report(_HANGS)
            wake()

    def _hung(self) -> list[_Question] | None:
        """Waits until the lookup under way is overdue; answers it and all behind it. None once closed."""
        with self._lock:
            while not self._is_closed:
                job, left_s = self._current, None
                if job is not None and not job.is_answered:
                    left_s = job.give_up - time.monotonic()
                    if left_s <= 0:
                        hung = [job, *self._queued]
                        self._queued.clear()
                        for one in hung:
                            one.answer(0, _HANGS)
                        return hung
                self._is_begun.wait(left_s)
            return None

    def _report(self, failure: str | None) -> None:
        if failure is not None:
            metrics.kv_store_failed_lookups.inc()
            self._failures.add(1, failure)
