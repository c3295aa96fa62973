"""Requests that wait for a place, in the order in which they get one. Pure.

By arrival or priority, a preempted request goes to the head, and a newcomer goes before requests with a later
`Request.queue_time`, but not before one that had begun. By slack, see `SlackQueue`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, MutableSequence, Sequence
from typing import Literal

from engine.request import Request
from engine.scheduling.equal_prompts import EqualPrompts


class WaitingQueue:
    def __init__(self, policy: Literal["fcfs", "priority"], equal_prompts: EqualPrompts) -> None:
        self._policy = policy
        self._equal_prompts = equal_prompts
        self._requests: MutableSequence[Request] = deque()
        self.num_held_back = 0  # at the last look for the first: they wait for the KV of a request that runs

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    @property
    def num_before_newcomer(self) -> int:
        """How many wait for a place that goes to them before a newcomer."""
        return len(self._requests) - self.num_held_back

    def add(self, request: Request) -> None:
        index = len(self._requests)
        if self._policy == "priority":
            while index and _goes_before(request, self._requests[index - 1]):
                index -= 1
        self._requests.insert(index, request)

    def put_first(self, request: Request) -> None:
        self._requests.insert(0, request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        self.num_held_back = min(self.num_held_back, len(self._requests))

    def first(self, running: Sequence[Request], num_places: int) -> Request | None:
        """The first request that may be admitted; None if there is no place for one. Requests that are held back keep
        their places: no later request takes them."""
        self.num_held_back = 0
        next_blocks = self._equal_prompts.next_blocks(running) if self._requests else {}
        for request in self._requests:
            if self.num_held_back >= num_places:
                return None
            if not self._equal_prompts.is_held_back(request, next_blocks):
                return request
            self.num_held_back += 1
        return None


class SlackQueue(WaitingQueue):
    """By the last moment to begin (`Pace.start_by`), which does not change while a request waits: so the order by slack
    is right at any time, and nothing is sorted again. Late requests come after all others, the longest overdue first.

    Requests without a pace, for lack of a model of time, are in the order of priority.
    """

    def __init__(self, equal_prompts: EqualPrompts) -> None:
        super().__init__("priority", equal_prompts)
        self._requests: list[Request] = []
        self._keys: list[tuple[int, float, int]] = []  # of `_requests`, ascending: class, moment, number
        self._key_of: dict[Request, tuple[int, float, int]] = {}
        self._number = 0

    def __contains__(self, request: object) -> bool:
        return request in self._key_of

    def add(self, request: Request) -> None:
        pace = request.pace
        if pace is None:
            self._insert(request, _ON_TIME, request.queue_time)
        elif pace.is_late:
            self._insert(request, _LATE, pace.due)
        else:
            self._insert(request, _ON_TIME, pace.start_by)

    def put_first(self, request: Request) -> None:
        """Only without a pace does a preempted request go to the head."""
        if request.pace is None:
            self._insert(request, _HEAD, -float(self._number))
        else:
            self.add(request)

    @property
    def num_before_newcomer(self) -> int:
        return max(self._num_on_time - self.num_held_back, 0)

    def lead(self, request: Request) -> None:
        """A place was made for it: it goes before all others until its pace changes."""
        self.remove(request)
        self._insert(request, _HEAD, -float(self._number))

    def remove(self, request: Request) -> None:
        index = bisect_left(self._keys, self._key_of.pop(request))
        del self._keys[index], self._requests[index]
        self.num_held_back = min(self.num_held_back, len(self._requests))

    def move(self, request: Request) -> None:
        """Its pace has changed."""
        self.remove(request)
        self.add(request)

    @property
    def head(self) -> Request | None:
        """Of those that are not late."""
        return self._requests[0] if self._keys and self._keys[0][0] != _LATE else None

    def on_time_after(self, request: Request, most: int) -> Sequence[Request]:
        """Up to `most` requests that follow in the order and are not late."""
        first = bisect_left(self._keys, self._key_of[request]) + 1
        return self._requests[first : min(first + most, self._num_on_time)]

    def overdue(self, now: float) -> Request | None:
        """The first of the late requests that has waited too long. One of high priority may be before it, of which only
        the time is over that its priority gives it."""
        index = self._num_on_time
        for request in self._requests[index : index + MOST_AHEAD]:
            if request.pace is not None and request.pace.overdue_at < now:
                return request
        return None

    @property
    def late_due(self) -> float:
        """When the first of the late requests has waited long enough; for ever if there is none."""
        index = self._num_on_time
        return self._keys[index][1] if index < len(self._keys) else math.inf

    @property
    def _num_on_time(self) -> int:
        return bisect_left(self._keys, (_LATE,))

    def _insert(self, request: Request, rank: int, moment: float) -> None:
        self._number += 1
        key = self._key_of[request] = (rank, moment, self._number)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._requests.insert(index, request)


_HEAD, _ON_TIME, _LATE = -1, 0, 1
MOST_AHEAD = 16  # late requests that may be before the one that has waited too long


def _goes_before(newcomer: Request, other: Request) -> bool:
    return other.scheduled_time is None and newcomer.queue_time < other.queue_time
