"""Who of those that wait goes next: by priority, and shared fairly between tenants. Pure; time comes from a clock.

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

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from common import metrics
from common.errors import OverloadedError
from common.types import PRIORITY_S

RATE_WEIGHT = 0.1  # of the latest interval between two free places, in the mean of them


class Turn(Protocol):
    """How a request that waits hears of the end of its wait: one of `came` and `refuse` is called, once."""

    @property
    def is_over(self) -> bool:
        """Whether its turn came, it was refused, or its caller has gone away and has not told the queue yet."""

    def came(self) -> None: ...

    def refuse(self, error: OverloadedError) -> None: ...


@dataclass(slots=True, eq=False)
class Waiting:
    tenant: str
    cost: float
    due: float  # when it would have come if it had no priority
    places: int  # that it takes once it runs
    turn: Turn


@dataclass(slots=True)
class _Tenant:
    priority: int
    weight: float
    clock: float
    waiting: list[Waiting] = field(default_factory=list)  # by `due`


class FairQueue:
    def __init__(
        self, max_running: int | None, *, max_waiting: int, max_wait_s: float, clock: Callable[[], float]
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
        self.max_wait_s = max_wait_s
        self._next()

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def ask(
        self,
        tenant: str,
        cost: float,
        turn: Turn,
        *,
        priority: int = 0,
        weight: float = 1.0,
        request_priority: int = 0,
        places: int = 1,
    ) -> Waiting | None:
        """A request comes. Returns None if it begins at once, else what `turn` waits with. Who waits calls `give_up` if
        it goes away or has waited for `max_wait_s`; who has begun calls `leave` at its end. Raises `OverloadedError` if
        the request would wait too long.

        `cost` in tokens. `priority` is the tenant's, higher is sooner; `request_priority` the request's among those of
        its tenant, lower is sooner. A request begins if one place is free, and then takes `places`: others wait until
        that many are free again."""
        due = self._clock() + PRIORITY_S * request_priority
        waiting = Waiting(tenant, cost, due, places, turn)
        if self._num_running < self._max_running and not self._num_waiting:
            self._start(waiting, weight)
            return None
        self._shed(waiting, priority)
        self._make_room(waiting)
        owner = self._tenants.get(tenant)
        if owner is None:
            clock = max(self._clocks.get(tenant, 0.0), self._now)
            owner = self._tenants[tenant] = _Tenant(priority, weight, clock)
        owner.priority, owner.weight = priority, weight
        insort(owner.waiting, waiting, key=attrgetter("due"))
        self._count(1)
        return waiting

    def _start(self, waiting: Waiting, weight: float) -> None:
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
            if not waiting.turn.is_over:  # its caller has not gone away a moment ago
                self._start(waiting, owner.weight)
                owner.clock = self._clocks[name]
                waiting.turn.came()
            self._drop_if_empty(name)
            self._count(-1)

    def give_up(self, waiting: Waiting) -> None:
        """The request does not wait any more. Does nothing if its wait has ended."""
        owner = self._tenants.get(waiting.tenant)
        if owner is not None and waiting in owner.waiting:
            owner.waiting.remove(waiting)
            self._drop_if_empty(waiting.tenant)
            self._count(-1)

    def waited_too_long(self) -> OverloadedError:
        """For a request that waited for `max_wait_s` and was given up."""
        return self._refusal(f"waited {self.max_wait_s:g} s for a place")

    def _drop_if_empty(self, name: str) -> None:
        if not self._tenants[name].waiting:
            del self._tenants[name]

    def _shed(self, waiting: Waiting, priority: int) -> None:
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
        if wait_s > self.max_wait_s:
            raise self._refusal(f"a place is free in about {wait_s:.0f} s", wait_s - self.max_wait_s)

    def _waiting_of(self, tenant: str) -> list[Waiting]:
        return self._tenants[tenant].waiting if tenant in self._tenants else []

    def _make_room(self, waiting: Waiting) -> None:
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
        if not last.turn.is_over:  # its caller has not gone away a moment ago
            last.turn.refuse(refusal)

    def _refusal(self, reason: str, retry_after_s: float | None = None) -> OverloadedError:
        metrics.router_refused.labels("queue").inc()
        fallback = (self._mean_interval_s or 0.0) * (self._num_waiting + 1)
        return OverloadedError(f"the router is busy: {reason}", min(max(retry_after_s or fallback, 1.0), 60.0))

    def _count(self, change: int) -> None:
        self._num_waiting += change
        metrics.router_requests_queued.set(self._num_waiting)
