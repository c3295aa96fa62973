"""Which child processes that ended are started again, and when. Pure: the caller says what time it is."""

from __future__ import annotations

from collections import defaultdict

WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class Restarts:
    """Each child may end `limit` times within WINDOW_S; once more, and it is given up.

    It waits for its start twice as long each time, from FIRST_DELAY_S up to MAX_DELAY_S: what made it end may pass, and
    meanwhile it should not take the cores of those that live.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ends: defaultdict[str, list[float]] = defaultdict(list)

    def delay_s(self, name: str, now: float) -> float | None:
        """The child has ended: seconds until it is started again, None if it is not."""
        self._ends[name] = [end for end in self._ends[name] if now - end < WINDOW_S] + [now]
        num_ends = len(self._ends[name])
        if num_ends > self._limit:
            return None
        return min(FIRST_DELAY_S * 2.0 ** (num_ends - 1), MAX_DELAY_S)
