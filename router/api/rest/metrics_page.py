"""The page for Prometheus, which anybody may ask for without a key."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.limits.token_bucket import TokenBucket

SHARE = 0.1  # of the event loop's time that making pages may take
BURST_S = 0.5  # of that time, after a while without them: some hundred pages


class MetricsPage:
    """Makes the page anew for each request, until that has taken its share of the event loop's time. Further requests
    get the last page again."""

    def __init__(
        self,
        make: Callable[[], bytes],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._make = make
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._bucket = TokenBucket(SHARE, BURST_S)
        self._page: bytes | None = None
        self._took_s = 0.0

    def get(self) -> bytes:
        now = self._clock()
        if self._page is None or not self._bucket.wait_s(self._took_s, now):
            begun_at = self._cpu_clock()
            self._page = self._make()
            self._took_s = self._cpu_clock() - begun_at
            self._bucket.take(self._took_s, now)
        return self._page
