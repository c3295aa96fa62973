"""Whether the processes that compute one model together still run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

STOPPED_S = 0.8  # a process that somebody stopped for so long counts as lost
_LOOKS_TOGETHER_S = 1.5  # what lies between two looks that are further apart was not seen: this process may have stood


class RankWatch:
    """Any process of a host may watch the others."""

    def __init__(
        self, pids: Sequence[int], clock: Callable[[], float] = time.monotonic, proc: Path = Path("/proc")
    ) -> None:
        """`pids` by rank."""
        self._pids = pids
        self._clock = clock
        self._proc = proc
        self._stopped: dict[int, tuple[float, float]] = {}  # by rank: when it was first and last seen so

    def problem(self, rank: int) -> str:
        """Why the rank will compute nothing any more, in one line; empty if it may. To be asked several times a second
        while something is wrong: a rank that stands still is found by the second look at the earliest."""
        state = self._state(self._pids[rank])
        if state in ("", "Z", "X"):
            return self.ended(rank)
        if state != "T":
            self._stopped.pop(rank, None)
            return ""
        now = self._clock()
        first, last = self._stopped.get(rank, (now, now))
        if now - last > _LOOKS_TOGETHER_S:
            first = now
        self._stopped[rank] = first, now
        return f"{self._name(rank)} was stopped by a signal" if now - first >= STOPPED_S else ""

    def ended(self, rank: int) -> str:
        """The line for a rank that is known to have ended."""
        return f"{self._name(rank)} has ended"

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self._pids[rank]})"

    def _state(self, pid: int) -> str:
        """The letter that proc(5) has for it; empty if there is no such process. A child that has ended stays a zombie
        until it is waited for, so its number is nobody else's."""
        try:
            return (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""
