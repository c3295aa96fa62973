"""A pool of threads that serves several owners in turn (`common.fair_queue`), by the seconds that their work takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from common.errors import BatonError, OverloadedError, UnavailableError
from common.fair_queue import FairQueue

ResultT = TypeVar("ResultT")

_CLOSED = "this process is shutting down"


class FullError(OverloadedError):
    """More work waits than may."""


@dataclass(slots=True, eq=False)
class _Work(Generic[ResultT]):
    owner: str
    call: Callable[[], ResultT]
    done: Future[ResultT]


class FairThreads:
    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        max_pending: int,
        full: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_pending`: pieces of work that are done or wait. If there are as many, whoever has most waiting loses its
        last one, or gets no further one in: the reason is `full`."""
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_pending = max_pending
        self._full = full
        self._clock = clock
        self._lock = threading.Lock()  # nobody's callbacks are called under it
        self._waiting: FairQueue[_Work[Any]] = FairQueue()
        self._num_running = 0

    def submit(self, owner: str, call: Callable[[], ResultT]) -> Future[ResultT]:
        """Work that is cancelled while it waits is never begun, and nothing of it is kept. Raises `FullError`, which is
        also the failure of work that has to make room, and `UnavailableError` after `close`."""
        work, displaced = _Work(owner, call, Future[ResultT]()), None
        with self._lock:
            if len(self._waiting) + self._num_running >= self._max_pending:
                displaced = self._waiting.make_room(owner)
                if displaced is None:
                    raise FullError(self._full)
            self._waiting.add(owner, work)
        if displaced is not None:
            _fail(displaced, FullError(self._full))
        try:
            self._pool.submit(self._do_next)
        except RuntimeError as error:  # of a pool that was shut down
            with self._lock:
                self._waiting.remove(owner, work)
            raise UnavailableError(_CLOSED) from error
        work.done.add_done_callback(partial(self._forget, work))
        return work.done

    def close(self, *, wait: bool = False) -> None:
        """Nothing is begun any more, and what waits fails. `wait`: until what was begun has ended."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [self._waiting.take()[1] for _ in range(len(self._waiting))]
        for work in left:
            _fail(work, UnavailableError(_CLOSED))
        if wait:
            self._pool.shutdown(wait=True)

    def _do_next(self) -> None:
        """Called once for each piece of work, some of which have been cancelled or displaced since."""
        with self._lock:
            if not self._waiting:
                return
            owner, work = self._waiting.take()
            self._num_running += 1
        began, is_begun = self._clock(), work.done.set_running_or_notify_cancel()
        result, error = _outcome(work.call) if is_begun else (None, None)
        with self._lock:  # before anybody hears of it, and has more to do
            self._num_running -= 1
            self._waiting.charge(owner, self._clock() - began)
        if error is not None:
            work.done.set_exception(error)
        elif is_begun:
            work.done.set_result(result)

    def _forget(self, work: _Work[Any], done: Future[Any]) -> None:
        if done.cancelled():
            with self._lock:
                self._waiting.remove(work.owner, work)


def _fail(work: _Work[Any], error: BatonError) -> None:
    """Of work that is not begun."""
    if work.done.set_running_or_notify_cancel():
        work.done.set_exception(error)


def _outcome(call: Callable[[], ResultT]) -> tuple[ResultT | None, BaseException | None]:
    """(result, error). A function of its own, so that the error's traceback does not keep the error."""
    try:
        return call(), None
    except BaseException as error:
        return None, error
