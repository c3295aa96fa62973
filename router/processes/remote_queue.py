"""The queue of a router of several processes is one, in their parent. A place there is asked for and given back by
message. If no limit is set, nothing waits and nothing is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Callable

from common import metrics
from common.errors import DeadlineError, OverloadedError, UnavailableError
from router.processes.messages import Enter, Leave, Message, Placed, QueueLimits, Refused

ANSWER_WAIT_S = 5.0  # for the parent's answer, beyond the time after which it refuses a request that waits


class RemoteQueue:
    """`RequestQueue`, as one process sees it."""

    def __init__(
        self,
        max_running: int | None,
        send: Callable[[Message], None],
        *,
        max_wait_s: float = math.inf,
        answer_wait_s: float = ANSWER_WAIT_S,
    ) -> None:
        self._max_wait_s = max_wait_s
        self._answer_wait_s = answer_wait_s
        self._is_limited = max_running is not None
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests of this process."""
        return len(self._waiting)

    def change(self, max_running: int | None, *, max_waiting: int, max_wait_s: float) -> None:
        """Sends new bounds to the parent, as each process does that reads the settings file; all send the same."""
        self._is_limited = max_running is not None
        self._max_wait_s = max_wait_s
        self._send(QueueLimits(max_running, max_waiting, max_wait_s))

    def heard(self, message: Placed | Refused) -> None:
        """Takes in the parent's answer. If the request was cancelled meanwhile, nobody waits for it."""
        turn = self._waiting.get(message.number)
        if turn is None or turn.done():
            return
        if isinstance(message, Placed):
            turn.set_result(None)
        elif message.retry_after_s is None:
            turn.set_exception(DeadlineError(message.reason))
        else:
            metrics.router_refused.labels("queue").inc()
            turn.set_exception(OverloadedError(message.reason, message.retry_after_s))

    @contextlib.asynccontextmanager
    async def place(
        self,
        tenant: str,
        cost: float,
        left_s: float = math.inf,
        *,
        priority: int = 0,
        weight: float = 1.0,
        request_priority: int = 0,
        places: int = 1,
    ) -> AsyncIterator[None]:
        """Does what `RequestQueue.place` does. Raises `UnavailableError` if the parent does not answer in time."""
        if not self._is_limited:
            yield
            return
        number = next(self._numbers)
        turn = self._waiting[number] = asyncio.get_running_loop().create_future()
        metrics.router_requests_queued.set(len(self._waiting))
        self._send(Enter(number, tenant, cost, left_s, priority, weight, request_priority, places))
        try:
            try:
                async with asyncio.timeout(min(self._max_wait_s, max(left_s, 0.0)) + self._answer_wait_s):
                    await turn
            except TimeoutError:
                raise UnavailableError("the router's parent process gives no places in its queue") from None
            finally:
                del self._waiting[number]
                metrics.router_requests_queued.set(len(self._waiting))
            yield
        finally:
            self._send(Leave(number))
