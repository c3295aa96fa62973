"""Where long texts are worked on, so that streams of other requests do not wait for them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.errors import OverloadedError

ResultT = TypeVar("ResultT")

SHORT = 4096  # characters, or tokens: about a millisecond of work, done at once
MAX_WAITING = 256


class TextThreads:
    """A few threads; work beyond that waits for its turn, and beyond `max_waiting` is refused."""

    def __init__(self, num_threads: int | None = None, max_waiting: int = MAX_WAITING) -> None:
        """`num_threads`: by default one for every two cores, up to four."""
        num_threads = num_threads or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._places = threading.BoundedSemaphore(num_threads + max_waiting)

    async def run(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Calls `work`, at once if it is small: `size` counts characters or tokens.

        Raises `OverloadedError`. What is cancelled while it waits is never begun.
        """
        if size <= SHORT:
            return work()
        if not self._places.acquire(blocking=False):
            raise OverloadedError("too many long texts wait to be tokenized")
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
