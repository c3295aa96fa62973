"""Requests that wait for a place, in the order in which they get one. Pure.

A preempted request goes to the head. A newcomer goes before requests with a later `Request.queue_time`, but not before
one that had begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from engine.request import Request
from engine.scheduling.equal_prompts import EqualPrompts


class WaitingQueue:
    def __init__(self, policy: Literal["fcfs", "priority"], equal_prompts: EqualPrompts) -> None:
        self._policy = policy
        self._equal_prompts = equal_prompts
        self._requests: deque[Request] = deque()
        self.num_held_back = 0  # at the last look for the first: they wait for the KV of a request that runs

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        index = len(self._requests)
        if self._policy == "priority":
            while index and _goes_before(request, self._requests[index - 1]):
                index -= 1
        self._requests.insert(index, request)

    def put_first(self, request: Request) -> None:
        self._requests.appendleft(request)

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


def _goes_before(newcomer: Request, other: Request) -> bool:
    return other.scheduled_time is None and newcomer.queue_time < other.queue_time
