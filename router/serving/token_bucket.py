"""A rate with a burst. Pure; time comes in."""

from __future__ import annotations


class TokenBucket:
    """Fills with `rate` a second up to `burst`; starts full.

    What is taken may be more than is there, if the bucket is full: a single large request is not refused for ever. The
    bucket is in debt then.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = burst
        self._balance = burst
        self._filled_at: float | None = None

    def change(self, rate: float, burst: float, now: float) -> None:
        """Of a limit that was read again: what was taken stays taken."""
        self._fill(now)
        self.rate, self.burst = rate, burst
        self._balance = min(self._balance, burst)

    def wait_s(self, num: float, now: float) -> float:
        """Seconds until `num` can be taken; 0 if they can be now. `now` in seconds, of any monotonic clock."""
        self._fill(now)
        return max(min(num, self.burst) - self._balance, 0.0) / self.rate

    def take(self, num: float, now: float) -> None:
        """Whether or not so many are there."""
        self._fill(now)
        self._balance -= num

    def _fill(self, now: float) -> None:
        if self._filled_at is not None:
            self._balance = min(self.burst, self._balance + (now - self._filled_at) * self.rate)
        self._filled_at = now
