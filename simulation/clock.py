"""Time that passes from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """Seconds since the start. Calls are made in the order of their times, those of one moment as they were asked
    for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Calls once, at `time`, or now if that has passed."""
        heapq.heappush(self._due, (time if time > self.now else self.now, next(self._numbers), call))

    @property
    def is_last_of_moment(self) -> bool:
        """Whether no further call is due now."""
        return not self._due or self._due[0][0] > self.now

    def steps(self, most: int) -> int:
        """Makes the next calls, so many at most. Returns how many there were."""
        due, pop = self._due, heapq.heappop
        for number in range(most):
            if not due:
                return number
            self.now, _, call = pop(due)
            call()
        return most

    def step(self) -> bool:
        """Makes the next call. False if there is none."""
        if not self._due:
            return False
        self.now, _, call = heapq.heappop(self._due)
        call()
        return True
