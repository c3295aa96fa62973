"""What waits of several owners: whoever has used least goes next, so nobody's backlog is before another's.

Start-time fair queueing (Goyal et al., 1996) for work whose cost is known only once it is done: each owner has a clock,
which its work moves on by what it took.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

MAX_CLOCKS = 4096


class FairQueue(Generic[ItemT]):
    def __init__(self) -> None:
        self._waiting: dict[str, deque[ItemT]] = {}  # of owners that have something waiting; the oldest first
        self._clocks: dict[str, float] = {}  # of owners that used something lately
        self._now = 0.0  # the clock of whose turn was last
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, owner: str, item: ItemT) -> None:
        self._waiting.setdefault(owner, deque()).append(item)
        self._num_waiting += 1

    def take(self) -> tuple[str, ItemT]:
        """The next item and its owner. Raises `ValueError` if nothing waits."""
        owner = min(self._waiting, key=self._clock)
        item = self._waiting[owner][0]
        self._now = self._clock(owner)
        self._clocks[owner] = self._now
        self.remove(owner, item)
        if len(self._clocks) > MAX_CLOCKS:  # an owner that is not ahead would begin at `_now` anyhow
            self._clocks = {name: clock for name, clock in self._clocks.items() if clock > self._now}
        return owner, item

    def charge(self, owner: str, cost: float) -> None:
        """The owner's work took `cost`, in any unit that is the same for all."""
        self._clocks[owner] = self._clocks.get(owner, self._now) + cost

    def remove(self, owner: str, item: ItemT) -> bool:
        """False if it does not wait."""
        waiting = self._waiting.get(owner, ())
        if item not in waiting:
            return False
        self._waiting[owner].remove(item)
        self._num_waiting -= 1
        if not self._waiting[owner]:
            del self._waiting[owner]
        return True

    def make_room(self, owner: str) -> ItemT | None:
        """Takes out the last item of whoever has most waiting. None, and no change, if that is `owner` once it has one
        more: its next item is the one too many."""
        if not self._waiting:
            return None
        largest = max(self._waiting, key=lambda name: len(self._waiting[name]))
        if len(self._waiting[largest]) <= len(self._waiting.get(owner, ())) + 1:
            return None
        last = self._waiting[largest][-1]
        self.remove(largest, last)
        return last

    def _clock(self, owner: str) -> float:
        return max(self._clocks.get(owner, 0.0), self._now)
