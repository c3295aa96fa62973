"""A rate with a burst. Pure; time comes in."""

from __future__ import annotations

from collections.abc import MutableSequence


class TokenBucket:
    """Fills with `rate` a second up to `burst`; starts full.

    What is taken may be more than is there, if the bucket is full: a single large request is not refused for ever. The
    bucket is in debt then.
    """

    def __init__(self, rate: float, burst: float, state: MutableSequence[float] | None = None) -> None:
        """`state` has three numbers, 0.0 at first, that the bucket keeps its own in: its balance, when that was so, and
        whether it was used. Buckets of several processes may share them."""
        self.rate = rate
        self.burst = burst
        self._state = [0.0, 0.0, 0.0] if state is None else state

    def change(self, rate: float, burst: float, now: float) -> None:
        """Sets a limit that was read again; what was taken stays taken."""
        self._fill(now)
        self.rate, self.burst = rate, burst
        self._state[0] = min(self._state[0], burst)

    def wait_s(self, num: float, now: float) -> float:
        """Seconds until `num` can be taken; 0 if they can be now. `now` in seconds, of any monotonic clock."""
        self._fill(now)
        return max(min(num, self.burst) - self._state[0], 0.0) / self.rate

    def take(self, num: float, now: float) -> None:
        """Takes `num`, even if fewer are left."""
        self._fill(now)
        self._state[0] -= num

    def _fill(self, now: float) -> None:
        balance, filled_at, is_used = self._state
        if not is_used:
            self._state[0], self._state[2] = self.burst, 1.0
        elif now > filled_at:
            self._state[0] = min(self.burst, balance + (now - filled_at) * self.rate)
        else:  # another process looked at the clock a moment later, and was here first
            return
        self._state[1] = now
