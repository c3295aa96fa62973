"""Tasks that a process cannot work without. If one of them ends while the process lives, that is a defect: the process
would go on, look healthy, and answer nobody. So the process ends with it.

    tasks = VitalTasks()
    tasks.start(registry.follow(), name="discovery")
    await tasks.failed_or(stop)        # the process's wait for its end
    ...drain...
    await tasks.close()
    tasks.raise_failure()              # the exit code is not 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine

from common import metrics
from common.errors import BatonError, InternalError

log = logging.getLogger(__name__)

COUNT_INTERVAL_S = 1.0


class VitalTasks:
    """The tasks of one event loop that the process stands on. `on_failure` is called once, with what ended first."""

    def __init__(self, on_failure: Callable[[BatonError], None] | None = None) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self._may_end = False
        self.failure: BatonError | None = None

    def start(self, work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        """Starts a task that may end only by being cancelled."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def failed_or(self, stop: asyncio.Event) -> None:
        """Returns when a task has failed, or when `stop` is set."""
        waits = [asyncio.create_task(event.wait()) for event in (self._failed, stop)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def raise_failure(self) -> None:
        """Raises what ended first, if anything did: the task's own `BatonError`, or an `InternalError`."""
        if self.failure is not None:
            raise self.failure

    def let_end(self) -> None:
        """The process is ending, so its tasks may end in any way from now on."""
        self._may_end = True

    def cancel(self) -> None:
        """Cancels all, and returns at once."""
        self.let_end()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancels all, and waits for them."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = asyncio.CancelledError("it was cancelled by nobody") if task.cancelled() else task.exception()
        was_cancelled = task.cancelling() > 0 and (error is None or task.cancelled())
        if self._may_end or was_cancelled:
            return
        name = task.get_name()
        if isinstance(error, BatonError):
            log.error("a task ended that this process stands on", extra={"task_name": name, "reason": error.message})
            failure = error
        else:
            reason = "without an error" if error is None else f"{type(error).__name__}: {error}"
            extra = {"task_name": name, "reason": reason}
            log.critical("a task ended that this process stands on", extra=extra, exc_info=error)
            failure = InternalError(f"the task {name!r} ended: {reason}")
        if self.failure is None:
            self.failure = failure
            self._failed.set()
            if self._on_failure is not None:
                self._on_failure(failure)


async def count_tasks(interval_s: float = COUNT_INTERVAL_S) -> None:
    """Keeps the count of the event loop's tasks in the metrics, until cancelled."""
    while True:
        metrics.process_tasks.set(len(asyncio.all_tasks()))
        await asyncio.sleep(interval_s)


def end_with_threads() -> None:
    """From now on this process ends with code 1 if one of its threads ends by an exception.

    For processes whose threads all matter: a caller would wait for ever for the results of a thread that is gone.
    """

    def end(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "?"
        error = args.exc_value
        log.critical("a thread ended that this process stands on", extra={"thread_name": name}, exc_info=error)
        os._exit(1)

    threading.excepthook = end
