"""When requests of batches may be with workers: they have what other requests leave.

    nobody else asks          as many as `most`, `quiet_s` after the last other request ended
    others are in flight      one for each 1 / `share` of them, rounded down

When others come, the ones that began last make way at once: their workers drop them, and keep what is in their caches.
They go on where they stopped when there is room again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType


class Room:
    """Of one router process."""

    def __init__(
        self,
        num_others: Callable[[], int],
        *,
        most: int,
        share: float,
        quiet_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_others`: requests in flight that are of no batch. `look` has to be called when it changes."""
        self._num_others = num_others
        self._most = most
        self._share = share
        self._quiet_s = quiet_s
        self._clock = clock
        self._others_at = clock() - quiet_s  # when the last of the others ended
        self._had_others = False
        self._inside: list[Place] = []  # the oldest first
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def place(self) -> Place:
        """Use it with `async with` around the time in which workers have one request; waits for its turn."""
        return Place(self)

    def _allowed(self) -> int:
        others = self._num_others()
        if others or self._had_others:
            self._others_at = self._clock()
        self._had_others = bool(others)
        return min(self._most, int(others * self._share)) if others else self._most

    def look(self) -> None:
        """Lets in who may come now, and has those make way who may stay no longer."""
        allowed = self._allowed()
        for place in self._inside[allowed:]:
            place.make_way()
        if not self._waiting or len(self._inside) >= allowed:
            return
        left_s = self._others_at + self._quiet_s - self._clock()
        if not self._had_others and left_s > 0:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(left_s, self._quiet)
            return
        num_free = allowed - len(self._inside)
        while self._waiting and num_free:
            turn = self._waiting.popleft()
            if not turn.done():  # or else it is being cancelled
                turn.set_result(None)
                num_free -= 1

    def _quiet(self) -> None:
        self._timer = None
        self.look()

    async def enter(self, place: Place) -> None:
        while True:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self.look()
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                if not turn.cancelled():  # its turn came at the same moment: the next one gets it
                    self.look()
                raise
            if len(self._inside) < self._allowed():  # nobody came since then
                self._inside.append(place)
                return

    def leave(self, place: Place) -> None:
        self._inside.remove(place)
        self.look()


class Place:
    """See `Room.place`."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._stop: Callable[[], object] | None = None
        self.makes_way = False

    async def __aenter__(self) -> Place:
        await self._room.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.leave(self)

    def on_way(self, stop: Callable[[], object]) -> None:
        """`stop` is called when the request has to make way: at once if it has to already."""
        self._stop = stop
        if self.makes_way:
            stop()

    def make_way(self) -> None:
        if not self.makes_way:
            self.makes_way = True
            if self._stop is not None:
                self._stop()
