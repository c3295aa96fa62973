"""Requests that wait in the router while the fleet is busy, as `FairQueue` decides, each in a task of its own."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from common.errors import DeadlineError, OverloadedError
from router.limits.fair_queue import FairQueue


class Places(Protocol):
    """`RequestQueue`, or another process's."""

    @property
    def num_waiting(self) -> int: ...

    def change(self, max_running: int | None, *, max_waiting: int, max_wait_s: float) -> None: ...

    def place(
        self,
        tenant: str,
        cost: float,
        left_s: float = math.inf,
        *,
        priority: int = 0,
        weight: float = 1.0,
        request_priority: int = 0,
        places: int = 1,
    ) -> AbstractAsyncContextManager[None]: ...


@dataclass(slots=True, frozen=True)
class _Asked:
    """See `RequestQueue.place`."""

    tenant: str
    cost: float
    left_s: float
    priority: int
    weight: float
    request_priority: int
    places: int


class RequestQueue(FairQueue):
    def __init__(
        self,
        max_running: int | None,
        *,
        max_waiting: int = 256,
        max_wait_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing waits if `max_running` is None."""
        super().__init__(max_running, max_waiting=max_waiting, max_wait_s=max_wait_s, clock=clock)

    def place(
        self,
        tenant: str,
        cost: float,
        left_s: float = math.inf,
        *,
        priority: int = 0,
        weight: float = 1.0,
        request_priority: int = 0,
        places: int = 1,
    ) -> AbstractAsyncContextManager[None]:
        """Use it around the time that a request is with workers; waits for its turn. `cost` in tokens, `left_s` to its
        deadline; the others as in `ask`.

        Raises `OverloadedError` if it would wait too long, or did, and `DeadlineError` if its deadline passes.
        """
        return _Place(self, _Asked(tenant, cost, left_s, priority, weight, request_priority, places))

    async def enter(self, asked: _Asked) -> None:
        turn = _FutureTurn()
        waiting = self.ask(
            asked.tenant,
            asked.cost,
            turn,
            priority=asked.priority,
            weight=asked.weight,
            request_priority=asked.request_priority,
            places=asked.places,
        )
        if waiting is None:
            return
        try:
            async with asyncio.timeout(min(self.max_wait_s, max(asked.left_s, 0.0))):
                await turn.future
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.has_come:  # at the same moment: the next request gets it
                self.leave(asked.places)
            else:
                self.give_up(waiting)
            if isinstance(error, asyncio.CancelledError):
                raise
            if asked.left_s <= self.max_wait_s:
                raise DeadlineError("the request's deadline passed before its turn came") from None
            raise self.waited_too_long() from None


class _FutureTurn:
    """A turn that a task waits for."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self.future.done()

    @property
    def has_come(self) -> bool:
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None

    def came(self) -> None:
        self.future.set_result(None)

    def refuse(self, error: OverloadedError) -> None:
        self.future.set_exception(error)


class _Place:
    """See `RequestQueue.place`. A generator would cost each request more."""

    __slots__ = ("_asked", "_queue")

    def __init__(self, queue: RequestQueue, asked: _Asked) -> None:
        self._queue = queue
        self._asked = asked

    async def __aenter__(self) -> None:
        await self._queue.enter(self._asked)

    async def __aexit__(self, *_: object) -> None:
        self._queue.leave(self._asked.places)
