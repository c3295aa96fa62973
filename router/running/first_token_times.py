"""How far predictions of first tokens were off lately, and what handoffs took. Pure.

A prediction knows what is queued, and not in which order workers take it, which of a prompt they turn out to have
cached, or how long messages take. So how often first tokens come sooner or later than predicted is learned, of requests
that want theirs by some time. What this decides is refused or moved, and never measured: `low` is of those that were
served after all.
"""

from __future__ import annotations

import statistics
from collections import deque

from router.policy.base import FirstTokenTarget
from router.policy.costs import CHUNK

WINDOW = 256  # requests
MIN_REQUESTS = 32  # before anything is known
SORT_EVERY = 16  # requests
LOW_SHARE = 0.05  # of first tokens, that came sooner than `low` times their prediction
HIGH_SHARE = 0.9  # of first tokens, that came within `high` times their prediction
UNKNOWN_LOW = 0.5
MOST_LOW = 0.8  # workers that go by slack give up requests before this one, so it may always come sooner
LEAST_HIGH = 1.0
LEAST_TOKENS = CHUNK // 2  # of a prompt whose handoff is looked at
FORGET_S = 60.0  # without a handoff
MOST_HIGH = 2.0  # of requests that were late anyway, first tokens come at any time


class FirstTokenTimes:
    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=WINDOW)  # measured / predicted
        self._low, self._high = UNKNOWN_LOW, LEAST_HIGH
        self._handoffs: deque[float] = deque(maxlen=WINDOW)  # seconds for a token of the last chunk
        self._num_unsorted = 0
        self._num_handoffs = 0
        self._handoff_token_s: float | None = None
        self._handed_over_at = 0.0

    def target(self, left_s: float, token_s: float | None = None) -> FirstTokenTarget:
        """Of a request whose first token is due in so many seconds, and the others in `token_s` each."""
        return FirstTokenTarget(left_s, token_s, self._low, self._high)

    def came(self, predicted_s: float, elapsed_s: float) -> None:
        """A first token came after `elapsed_s`."""
        if predicted_s <= 0:
            return
        self._ratios.append(elapsed_s / predicted_s)
        self._num_unsorted += 1
        if len(self._ratios) >= MIN_REQUESTS and self._num_unsorted >= SORT_EVERY:
            self._num_unsorted = 0
            ordered = sorted(self._ratios)
            last = len(ordered) - 1
            self._low = min(ordered[int(LOW_SHARE * last)], MOST_LOW)
            self._high = min(max(ordered[int(HIGH_SHARE * last)], LEAST_HIGH), MOST_HIGH)

    def handoff_token_s(self, now: float) -> float | None:
        """Seconds that a token of a prompt's last chunk took lately; None if nobody knows. What was measured is
        forgotten if nothing comes any more: slow handoffs keep prompts in place, and then nothing else is learned."""
        if self._handoff_token_s is not None and now - self._handed_over_at > FORGET_S:
            self._handoff_token_s = None
            self._handoffs.clear()
            self._num_handoffs = 0
        return self._handoff_token_s

    def handed_over(self, num_tokens: int, elapsed_s: float, now: float) -> None:
        """The last KV of a prompt of which a prefill worker computed `num_tokens` came so long after its first token.
        Of few tokens that says nothing: what a handoff costs however short it is would count as theirs."""
        if num_tokens < LEAST_TOKENS:
            return
        self._handed_over_at = now
        self._handoffs.append(elapsed_s / min(num_tokens, CHUNK))
        self._num_handoffs += 1
        if self._num_handoffs % SORT_EVERY == 0:
            self._handoff_token_s = statistics.median(self._handoffs)
