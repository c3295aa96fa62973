"""Threads for work on long texts, so that streams of other requests do not wait for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

from common import metrics
from common.fair_threads import FairThreads, FullError
from router.limits.clients import NOBODY, ApiClient

ResultT = TypeVar("ResultT")

SHORT = 4096  # characters, or tokens: about a millisecond of work, done at once
MAX_WAITING = 256


class TextThreads:
    """A few threads; work beyond that waits for its turn, and beyond `max_waiting` is refused. Clients take turns
    (`common.fair_threads`): a tenant's backlog is behind its own work alone."""

    def __init__(
        self,
        num_threads: int | None = None,
        max_waiting: int = MAX_WAITING,
        what: str = "long texts wait to be tokenized",
    ) -> None:
        """`num_threads`: by default one for every two cores, up to four. `what` is what waits, as the
        error says if it is too much."""
        num_threads = num_threads or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._threads = FairThreads(num_threads, "text", max_pending=num_threads + max_waiting, full=f"too many {what}")

    async def run(self, size: int, work: Callable[[], ResultT], client: ApiClient | None = None) -> ResultT:
        """Calls `work`, at once if it is small: `size` counts characters or tokens. `client`: who asked for it.

        Raises `OverloadedError`, and `UnavailableError` after `close`. Work that is cancelled while it waits is never
        begun, and nothing of it is kept. A thread that has begun finishes, and is busy until then.
        """
        if size <= SHORT:
            return work()
        try:
            return await asyncio.wrap_future(self._threads.submit((client or NOBODY).owner, work))
        except FullError:
            metrics.router_refused.labels("texts").inc()
            raise

    def close(self) -> None:
        """Waits for the threads: each has one piece of work at most, of a second or so."""
        self._threads.close(wait=True)
