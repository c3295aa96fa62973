"""How fast something arrives, from a counter that is read now and then."""

from __future__ import annotations

from collections import deque


class ArrivalRate:
    """Mean over the last `window_s` seconds of a total that only grows. Pure: time comes in as an argument."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, float]] = deque()

    def add(self, now: float, total: float) -> None:
        """A total that is smaller than before is another counter (a restarted process): it starts anew."""
        if self._readings and total < self._readings[-1][1]:
            self._readings.clear()
        self._readings.append((now, total))
        while len(self._readings) > 2 and self._readings[1][0] <= now - self._window_s:
            self._readings.popleft()

    def rate(self) -> float | None:
        """Arrivals a second; None until there are two readings."""
        if len(self._readings) < 2:
            return None
        (first_at, first), (last_at, last) = self._readings[0], self._readings[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None
