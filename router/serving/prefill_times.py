"""Decides when a prefill worker is late: it takes much longer than prompts lately took for the same work. Pure.

What a prompt costs is counted in tokens (`router.policy.routing`): those in the worker's queue and its own. Its time is
the prefill worker's own account, from its request to its first token. A worker that has not even given a block by then
is late.
"""

from __future__ import annotations

from collections import deque

FIXED_TOKENS = 256  # of work that each prompt costs beside its own tokens
WINDOW = 256  # prompts
MIN_PROMPTS = 16  # before anything is known
SHARE = 0.95  # percentile of the seconds per token that counts as usual
LATE_FACTOR = 2.0  # times what is usual
MIN_LATE_S = 0.25
SORT_EVERY = 16  # prompts


def pace_s(cost: float, elapsed_s: float) -> float:
    """Seconds for one token of a prompt that cost so many tokens."""
    return elapsed_s / (cost + FIXED_TOKENS)


class PrefillTimes:
    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=WINDOW)  # seconds for one token
        self._num_unsorted = 0
        self._usual_s = 0.0  # for one token

    def came(self, cost: float, elapsed_s: float) -> None:
        """Notes that a prompt that cost so many tokens took so long."""
        self._times.append(pace_s(cost, elapsed_s))
        self._num_unsorted += 1
        if len(self._times) == MIN_PROMPTS or self._num_unsorted >= SORT_EVERY:
            self._num_unsorted = 0
            self._usual_s = sorted(self._times)[int(SHARE * (len(self._times) - 1))]

    def late_s(self, cost: float) -> float | None:
        """Seconds after which a worker with a prompt that costs so many tokens is late; None while nobody knows."""
        if len(self._times) < MIN_PROMPTS:
            return None
        return max(LATE_FACTOR * self._usual_s * (cost + FIXED_TOKENS), MIN_LATE_S)
