"""Decides when a prefill worker is late, and how long a prompt took beside others like it. Pure.

A worker is late if it takes much longer than prompts lately took for the same work.

If the workers said how long their steps take, a prompt's time is predicted, and what is usual is learned as a multiple
of that. Else what a prompt costs is counted in tokens: those in the worker's queue and its own. Its time is the prefill
worker's own account, from its request to its first token. A worker that has not even given a block by then is late.
"""

from __future__ import annotations

import statistics
from collections import deque

FIXED_TOKENS = 256  # of work that each prompt costs beside its own tokens
WINDOW = 256  # prompts
MIN_PROMPTS = 16  # before anything is known
SHARE = 0.95  # percentile of the seconds per token that counts as usual
LATE_FACTOR = 2.0  # times what is usual
MIN_LATE_S = 0.25
SORT_EVERY = 16  # prompts
LIKE_WINDOW = 64  # prompts of one size
MIN_LIKE = 8  # before anything is known of that size
SLOW_MARGIN_S = 0.05  # what a prompt may take longer than others without being slow


class PrefillTimes:
    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=WINDOW)  # seconds for one token
        self._num_unsorted = 0
        self._usual_s = 0.0  # for one token
        self._multiples: deque[float] = deque(maxlen=WINDOW)  # of what was predicted
        self._usual_multiple = 1.0

    def came(self, cost: float, elapsed_s: float, predicted_s: float | None = None) -> None:
        """Notes that a prompt that cost so many tokens took so long, and `predicted_s` were predicted."""
        if predicted_s:
            self._multiples.append(elapsed_s / predicted_s)
            if len(self._multiples) % SORT_EVERY == 0 or len(self._multiples) == WINDOW:
                self._usual_multiple = max(1.0, sorted(self._multiples)[int(SHARE * (len(self._multiples) - 1))])
        self._times.append(elapsed_s / (cost + FIXED_TOKENS))
        self._num_unsorted += 1
        if len(self._times) == MIN_PROMPTS or self._num_unsorted >= SORT_EVERY:
            self._num_unsorted = 0
            self._usual_s = sorted(self._times)[int(SHARE * (len(self._times) - 1))]

    def late_s(self, cost: float, predicted_s: float | None = None) -> float | None:
        """Seconds after which a worker with a prompt that costs so many tokens, or is predicted to take so long, is
        late; None while nobody knows."""
        if predicted_s is not None:
            return max(LATE_FACTOR * self._usual_multiple * predicted_s, MIN_LATE_S)
        if len(self._times) < MIN_PROMPTS:
            return None
        return max(LATE_FACTOR * self._usual_s * (cost + FIXED_TOKENS), MIN_LATE_S)


class LikePrompts:
    """Prompts of one size have about the same cost and the same length: what a token costs grows with what comes before
    it, and what every prompt costs beside its tokens is more on one machine than on another."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], deque[float]] = {}

    def times_usual(
        self, cost: float, num_tokens: int, elapsed_s: float, predicted_s: float | None = None
    ) -> float | None:
        """Notes a prompt of `num_tokens` that took so long: how many times as long as the middle one of the last of its
        size, on whichever worker they were. None while nobody knows, 1 if it took hardly longer.

        If it was predicted: how many times as long as that, since a worker of a slower kind is none that is slow."""
        if predicted_s:
            return 1.0 if elapsed_s < predicted_s + SLOW_MARGIN_S else elapsed_s / predicted_s
        size = int(cost).bit_length(), num_tokens.bit_length()
        times = self._times.setdefault(size, deque(maxlen=LIKE_WINDOW))
        times.append(elapsed_s / max(cost, 1.0))
        if len(times) < MIN_LIKE:
            return None
        usual_s = statistics.median(times) * max(cost, 1.0)
        return 1.0 if elapsed_s < usual_s + SLOW_MARGIN_S else elapsed_s / usual_s
