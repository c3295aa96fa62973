"""The page for Prometheus, which anybody may ask for without a key."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.metric_aliases import CacheFacts
from common.types import WorkerState
from router.fleet.registry import Registry
from router.limits.token_bucket import TokenBucket

SHARE = 0.1  # of the event loop's time that making pages may take
BURST_S = 0.5  # of that time, after a while without them: some hundred pages


class MetricsPage:
    """Makes the page anew for each request, until that has taken its share of the event loop's time. Further requests
    get the last page of their format again."""

    def __init__(
        self,
        make: Callable[[bool], bytes],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`make` is told whether the page is to be OpenMetrics."""
        self._make = make
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._bucket = TokenBucket(SHARE, BURST_S)
        self._pages: dict[bool, bytes] = {}
        self._took_s = 0.0

    def get(self, *, is_openmetrics: bool = False) -> bytes:
        now = self._clock()
        if is_openmetrics not in self._pages or not self._bucket.wait_s(self._took_s, now):
            begun_at = self._cpu_clock()
            self._pages[is_openmetrics] = self._make(is_openmetrics)
            self._took_s = self._cpu_clock() - begun_at
            self._bucket.take(self._took_s, now)
        return self._pages[is_openmetrics]


def cache_facts(registry: Registry) -> CacheFacts | None:
    """Of the ready decode workers together; None while no model is served."""
    model = registry.model
    if model is None:
        return None
    loads = [one.load for one in registry.endpoints() if one.can_decode and one.state is WorkerState.READY]
    return CacheFacts(
        model=model.limits.model,
        block_size=model.block_size,
        num_blocks=sum(load.num_blocks for load in loads),
        num_used_blocks=sum(load.num_blocks - load.num_free_blocks - load.num_cached_blocks for load in loads),
    )
