"""Keeps retries and hedges, of decode and of prefill workers, from becoming the load. A token bucket; pure, time comes
in."""

from __future__ import annotations


class RetryBudget:
    """Retries may add `ratio` of the requests' number, plus `floor_per_s`; unspent ones are kept for `window_s`.

    One budget for all requests of a router, and one for the hedges of a decode worker. It starts full, so that the
    first lost worker costs no request.
    """

    def __init__(self, *, ratio: float = 0.2, floor_per_s: float = 10.0, window_s: float = 10.0) -> None:
        self._ratio = ratio
        self._floor_per_s = floor_per_s
        self._capacity = floor_per_s * window_s
        self._balance = self._capacity
        self._refilled_at: float | None = None

    def allows(self, now: float) -> bool:
        """Whether a retry may start now. `now` in seconds, of any monotonic clock."""
        if self._refilled_at is not None:
            refill = (now - self._refilled_at) * self._floor_per_s
            self._balance = min(self._capacity, self._balance + refill)
        self._refilled_at = now
        return self._balance >= 1

    def request(self) -> None:
        """A new request came."""
        self._balance = min(self._capacity, self._balance + self._ratio)

    def spend(self, now: float) -> bool:
        """Takes one retry out; False if none is left."""
        if not self.allows(now):
            return False
        self._balance -= 1
        return True


def hedge_budget() -> RetryBudget:
    """That of a decode worker's hedges, of the prompts that prefill workers are asked for."""
    return RetryBudget(ratio=0.1, floor_per_s=1.0, window_s=16.0)
