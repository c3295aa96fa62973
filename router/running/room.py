"""When requests of batches may be with workers: they have what other requests leave.

    nobody else asks          as many as `most`, `quiet_s` after the last other request ended
    others are in flight      one for each 1 / `share` of them, rounded down
    and that has been none    one at a time, once some have waited `patience_s`, until there is room again

When others come, the ones that began last make way at once: their workers drop them, and keep what is in their caches.
They go on where they stopped when there is room again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)

PATIENCE_S = 300.0  # traffic that never stops would keep batches from their end for ever


class Room:
    """Of one router process."""

    def __init__(
        self,
        num_others: Callable[[], int],
        *,
        most: int,
        share: float,
        quiet_s: float = 0.0,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_others`: requests in flight that are of no batch. `look` has to be called when it changes."""
        self._num_others = num_others
        self._most = most
        self._share = share
        self._quiet_s = quiet_s
        self._patience_s = patience_s
        self._clock = clock
        self._others_at = clock() - quiet_s  # when the last of the others ended
        self._had_others = False
        self._inside: list[Place] = []  # the oldest first
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._no_room_since: float | None = None  # when one first waited; None since there was room
        self._was_told = False  # that they wait long
        self._used_at = clock()  # when one last came or left
        self._patience_timer: asyncio.TimerHandle | None = None

    def place(self) -> Place:
        """Use it with `async with` around the time in which workers have one request; waits for its turn."""
        return Place(self)

    def _share_of_others(self) -> int:
        others = self._num_others()
        if others or self._had_others:
            self._others_at = self._clock()
        self._had_others = bool(others)
        return min(self._most, int(others * self._share)) if others else self._most

    def _waited_long(self) -> bool:
        return self._no_room_since is not None and self._clock() >= self._no_room_since + self._patience_s

    def _allowed(self, share: int) -> int:
        return max(share, int(self._waited_long()))

    def look(self) -> None:
        """Lets in who may come now, and has those make way who may stay no longer."""
        share = self._share_of_others()
        left_s = 0.0 if self._had_others else self._others_at + self._quiet_s - self._clock()
        if share and left_s <= 0:
            self._no_room_since = None
        elif self._waiting and self._no_room_since is None:
            self._no_room_since, self._was_told = self._clock(), False
        allowed = self._allowed(share)
        for place in self._inside[allowed:]:
            place.make_way()
        may_come = allowed if left_s <= 0 else int(self._waited_long())
        num_free = may_come - len(self._inside)
        if self._waiting and num_free > 0:
            self._tell()
        while self._waiting and num_free > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # or else it is being cancelled
                turn.set_result(None)
                num_free -= 1
        if self._waiting:
            self._look_later(left_s)

    def _tell(self) -> None:
        if self._waited_long() and not self._was_told:
            self._was_told = True
            log.warning(
                "batches have waited long for room: one line at a time goes on beside other requests",
                extra={"waited_s": self._patience_s},
            )

    def _look_later(self, quiet_in_s: float) -> None:
        """There may be room later although nothing changes."""
        loop = asyncio.get_running_loop()
        if quiet_in_s > 0 and self._timer is None:
            self._timer = loop.call_later(quiet_in_s, self._quiet)
        if self._no_room_since is not None and not self._waited_long() and self._patience_timer is None:
            left_s = self._no_room_since + self._patience_s - self._clock()
            self._patience_timer = loop.call_later(left_s, self._patience_ends)

    def _patience_ends(self) -> None:
        self._patience_timer = None
        self.look()

    def _quiet(self) -> None:
        self._timer = None
        self.look()

    async def enter(self, place: Place) -> None:
        is_first = not self._inside and not self._waiting
        if is_first and self._clock() >= self._used_at + self._patience_s:  # the wait of earlier ones is not theirs
            self._no_room_since = None
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
            if len(self._inside) < self._allowed(self._share_of_others()):  # nobody came since then
                self._inside.append(place)
                self._used_at = self._clock()
                return

    def leave(self, place: Place) -> None:
        self._inside.remove(place)
        self._used_at = self._clock()
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
