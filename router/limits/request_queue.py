"""Requests that wait in the router while the fleet is busy: bounded, by priority, and shared fairly between tenants.

`max_running` requests are with workers at a time. Further ones wait here, where a tenant's backlog is behind its own
requests and not before others':

    priority   a tenant's, from the limits file: all waiting requests of a higher one go first
    share      tenants of one priority take turns by virtual time (start-time fair queueing, Goyal et al., 1996): each
               has a clock that a request moves on by its cost, in tokens, over the tenant's weight; the one whose clock
               is furthest behind goes next
    order      of a tenant's own requests: by arrival, and a request's own priority counts as in a worker's queue
    bound      if the queue is full, the tenant that has the most waiting loses its last one, or is refused
    shedding   a request that would wait longer than `max_wait_s`, as places have become free lately, is refused at once
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from common import metrics
from common.errors import DeadlineError, OverloadedError
from common.types import PRIORITY_S

RATE_WEIGHT = 0.1  # of the latest interval between two free places, in the mean of them


@dataclass(slots=True, eq=False)
class _Waiting:
    tenant: str
    cost: float
    due: float  # when it would have come if it had no priority
    places: int  # that it takes once it runs
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(slots=True)
class _Tenant:
    priority: int
    weight: float
    clock: float
    waiting: list[_Waiting] = field(default_factory=list)  # by `due`


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


class RequestQueue:
    def __init__(
        self,
        max_running: int | None,
        *,
        max_waiting: int = 256,
        max_wait_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing waits if `max_running` is None."""
        self._clock = clock
        self._num_running = 0
        self._num_waiting = 0
        self._tenants: dict[str, _Tenant] = {}  # those that wait
        self._now = 0.0  # virtual time: the clock of who went last
        self._clocks: dict[str, float] = {}  # of tenants that went lately
        self._freed_at: float | None = None
        self._mean_interval_s: float | None = None
        self.change(max_running, max_waiting=max_waiting, max_wait_s=max_wait_s)

    def change(self, max_running: int | None, *, max_waiting: int, max_wait_s: float) -> None:
        """Sets other bounds from now on. Requests that wait or run stay, so there may be too many of them for a
        while."""
        self._max_running = math.inf if max_running is None else max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._next()

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

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
        deadline. A request begins if one place is free, and then takes `places`: others wait until that many are free
        again. `priority` is the tenant's, higher is sooner; `request_priority` the request's among those of its tenant,
        lower is sooner.

        Raises `OverloadedError` if it would wait too long, or did, and `DeadlineError` if its deadline passes.
        """
        due = self._clock() + PRIORITY_S * request_priority
        return _Place(self, _Waiting(tenant, cost, due, places), left_s, priority, weight)

    async def enter(self, waiting: _Waiting, left_s: float, priority: int, weight: float) -> None:
        tenant = waiting.tenant
        if self._num_running < self._max_running and not self._num_waiting:
            self._start(waiting, weight)
            return
        self._shed(waiting, priority)
        self._make_room(waiting)
        owner = self._tenants.get(tenant)
        if owner is None:
            clock = max(self._clocks.get(tenant, 0.0), self._now)
            owner = self._tenants[tenant] = _Tenant(priority, weight, clock)
        owner.priority, owner.weight = priority, weight
        insort(owner.waiting, waiting, key=attrgetter("due"))
        self._count(1)
        try:
            async with asyncio.timeout(min(self._max_wait_s, max(left_s, 0.0))):
                await waiting.turn
        except TimeoutError:
            self._give_up(waiting)
            if left_s <= self._max_wait_s:
                raise DeadlineError("the request's deadline passed before its turn came") from None
            raise self._refusal(f"waited {self._max_wait_s:g} s for a place") from None
        except asyncio.CancelledError:
            self._give_up(waiting)
            raise

    def _start(self, waiting: _Waiting, weight: float) -> None:
        self._num_running += waiting.places
        began = max(self._clocks.get(waiting.tenant, 0.0), self._now)
        self._now = began
        self._clocks[waiting.tenant] = began + waiting.cost / weight
        if len(self._clocks) > 4096:  # who is not ahead of time would start at it anyhow
            self._clocks = {name: clock for name, clock in self._clocks.items() if clock > self._now}

    def leave(self, places: int) -> None:
        self._num_running -= places
        now = self._clock()
        if self._freed_at is not None and self._num_waiting:
            latest = now - self._freed_at
            mean = self._mean_interval_s
            self._mean_interval_s = latest if mean is None else mean + RATE_WEIGHT * (latest - mean)
        self._freed_at = now if self._num_waiting else None  # intervals count only while somebody waits for the next
        self._next()

    def _next(self) -> None:
        while self._tenants and self._num_running < self._max_running:
            name, owner = min(self._tenants.items(), key=lambda item: (-item[1].priority, item[1].clock))
            waiting = owner.waiting.pop(0)
            if not waiting.turn.done():  # its caller has not gone away a moment ago
                self._start(waiting, owner.weight)
                owner.clock = self._clocks[name]
                waiting.turn.set_result(None)
            self._drop_if_empty(name)
            self._count(-1)

    def _give_up(self, waiting: _Waiting) -> None:
        """The request does not wait any more. If its turn came at the same moment, the next request gets it."""
        if waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
            self.leave(waiting.places)
            return
        owner = self._tenants.get(waiting.tenant)
        if owner is not None and waiting in owner.waiting:
            owner.waiting.remove(waiting)
            self._drop_if_empty(waiting.tenant)
            self._count(-1)

    def _drop_if_empty(self, name: str) -> None:
        if not self._tenants[name].waiting:
            del self._tenants[name]

    def _shed(self, waiting: _Waiting, priority: int) -> None:
        """Refuses a newcomer that would wait too long: for requests of higher priority, and for its fair share among
        those of its own."""
        if self._mean_interval_s is None:
            return
        higher = sum(len(one.waiting) for one in self._tenants.values() if one.priority > priority)
        own = sum(one.due <= waiting.due for one in self._waiting_of(waiting.tenant))
        others = [len(one.waiting) for name, one in self._tenants.items()
                  if one.priority == priority and name != waiting.tenant]  # fmt: skip
        ahead = higher + own + sum(min(num, own + 1) for num in others)
        wait_s = (ahead + 1) * self._mean_interval_s
        if wait_s > self._max_wait_s:
            raise self._refusal(f"a place is free in about {wait_s:.0f} s", wait_s - self._max_wait_s)

    def _waiting_of(self, tenant: str) -> list[_Waiting]:
        return self._tenants[tenant].waiting if tenant in self._tenants else []

    def _make_room(self, waiting: _Waiting) -> None:
        if self._num_waiting < self._max_waiting:
            return
        most, greediest = max((len(one.waiting), name) for name, one in self._tenants.items())
        own = self._waiting_of(waiting.tenant)
        refusal = self._refusal(f"{self._max_waiting} requests wait already")
        if len(own) + 1 >= most:
            if not own or waiting.due >= own[-1].due:
                raise refusal
            greediest = waiting.tenant
        last = self._tenants[greediest].waiting.pop()
        self._drop_if_empty(greediest)
        self._count(-1)
        if not last.turn.done():  # its caller has not gone away a moment ago
            last.turn.set_exception(refusal)

    def _refusal(self, reason: str, retry_after_s: float | None = None) -> OverloadedError:
        metrics.router_refused.labels("queue").inc()
        fallback = (self._mean_interval_s or 0.0) * (self._num_waiting + 1)
        return OverloadedError(f"the router is busy: {reason}", min(max(retry_after_s or fallback, 1.0), 60.0))

    def _count(self, change: int) -> None:
        self._num_waiting += change
        metrics.router_requests_queued.set(self._num_waiting)


class _Place:
    """See `RequestQueue.place`. A generator would cost each request more."""

    __slots__ = ("_left_s", "_priority", "_queue", "_waiting", "_weight")

    def __init__(self, queue: RequestQueue, waiting: _Waiting, left_s: float, priority: int, weight: float) -> None:
        self._queue = queue
        self._waiting = waiting
        self._left_s = left_s
        self._priority = priority
        self._weight = weight

    async def __aenter__(self) -> None:
        await self._queue.enter(self._waiting, self._left_s, self._priority, self._weight)

    async def __aexit__(self, *_: object) -> None:
        self._queue.leave(self._waiting.places)
