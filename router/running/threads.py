"""Threads for work on long texts, so that streams of other requests do not wait for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from common import metrics
from common.errors import OverloadedError, UnavailableError

ResultT = TypeVar("ResultT")

SHORT = 4096  # characters, or tokens: about a millisecond of work, done at once
MAX_WAITING = 256


class TextThreads:
    """A few threads; work beyond that waits for its turn, and beyond `max_waiting` is refused. For one event loop."""

    def __init__(
        self,
        num_threads: int | None = None,
        max_waiting: int = MAX_WAITING,
        what: str = "long texts wait to be tokenized",
    ) -> None:
        """`num_threads`: by default one for every two cores, up to four. `what` is what waits, as the
        error says if it is too much."""
        num_threads = num_threads or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._free = asyncio.Semaphore(num_threads)
        self._max_waiting = max_waiting
        self._what = what
        self._num_waiting = 0

    async def run(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Calls `work`, at once if it is small: `size` counts characters or tokens.

        Raises `OverloadedError`, and `UnavailableError` after `close`. Work that is cancelled while it waits is never
        begun, and nothing of it is kept. A thread that has begun finishes, and is busy until then.
        """
        if size <= SHORT:
            return work()
        await self._take_thread()
        try:
            future = self._pool.submit(work)
        except RuntimeError as error:  # closed
            self._free.release()
            raise UnavailableError("the router is shutting down") from error
        future.add_done_callback(self._releasing(asyncio.get_running_loop()))
        return await asyncio.wrap_future(future)

    async def _take_thread(self) -> None:
        if self._free.locked() and self._num_waiting >= self._max_waiting:
            metrics.router_refused.labels("texts").inc()
            raise OverloadedError(f"too many {self._what}")
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1

    def _releasing(self, loop: asyncio.AbstractEventLoop) -> Callable[[Future[ResultT]], None]:
        def release(_: Future[ResultT]) -> None:  # on the thread
            loop.call_soon_threadsafe(self._free.release)

        return release

    def close(self) -> None:
        """Waits for the threads: each has one piece of work at most, of a second or so."""
        self._pool.shutdown(wait=True, cancel_futures=True)
