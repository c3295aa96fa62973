"""Which child processes that ended are started again, and when. Pure: the caller says what time it is."""

from __future__ import annotations

from collections import defaultdict

WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class Restarts:
    """Each child may end `limit` times within WINDOW_S; if it ends once more, it is given up.

    The wait before each restart doubles, from `first_delay_s` up to MAX_DELAY_S: the cause may pass, and meanwhile the
    child should not take cores from the others.
    """

    def __init__(self, limit: int, first_delay_s: float = FIRST_DELAY_S) -> None:
        self._limit = limit
        self._first_delay_s = first_delay_s
        self._ends: defaultdict[str, list[float]] = defaultdict(list)

    def delay_s(self, name: str, now: float) -> float | None:
        """Notes that the child has ended. Returns the seconds until its restart; None if it is given up."""
        self._ends[name] = [end for end in self._ends[name] if now - end < WINDOW_S] + [now]
        num_ends = len(self._ends[name])
        if num_ends > self._limit:
            return None
        return min(self._first_delay_s * 2.0 ** (num_ends - 1), MAX_DELAY_S)
