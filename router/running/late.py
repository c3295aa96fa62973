"""Requests whose first token no workers can give in time, as they predict it: refused at once, or served all the same.

Who is refused is told when to ask again: when the queues that stand now will have become short enough. Those that were
refused before come back, too, and each takes its prompt's time of all workers, so each is told a later moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from common import metrics
from common.errors import OverloadedError
from common.targets import LatencyTargets
from router.policy.base import Late

log = logging.getLogger(__name__)

MIN_DELAY_S = 1.0
MAX_DELAY_S = 60.0


class LateRequests:
    """Of one router process."""

    def __init__(self, *, refuses: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.refuses = refuses  # may change at any time
        self._clock = clock
        self._free_at = 0.0  # when those that were refused will have been served, if they come back when they are told

    def take(self, request_id: str, targets: LatencyTargets, age_s: float, late: Late) -> None:
        """Counts and logs a request that is `late`, `age_s` after it came. Raises `OverloadedError` if such requests
        are refused."""
        if targets.ttft_ms is None:
            raise ValueError("the request wants its first token at no time")
        cause = "prompt" if late.alone_s > targets.ttft_ms / 1000 else "queue"
        metrics.router_late_requests.labels("refused" if self.refuses else "best_effort", cause).inc()
        reason = (
            f"its first token is wanted {targets.ttft_ms:g} ms after it came (ttft_ms), {1000 * age_s:.0f} ms ago; "
            f"the soonest worker is predicted to give it in {1000 * late.soonest_s:.0f} ms, of which computing the "
            f"prompt takes {1000 * min(late.alone_s, late.soonest_s):.0f} ms"
        )
        extra = {"request_id": request_id, "reason": reason, "refused": self.refuses}
        log.info("no worker can give a first token in time", extra=extra)
        if self.refuses:
            delay_s = MAX_DELAY_S if cause == "prompt" else self._delay_s(targets.ttft_ms / 1000, late)
            raise OverloadedError(reason, delay_s)

    def _delay_s(self, ttft_s: float, late: Late) -> float:
        now = self._clock()
        begin = max(now + late.soonest_s - ttft_s, self._free_at, now)
        self._free_at = min(begin, now + MAX_DELAY_S) + late.alone_s / max(late.num_workers, 1)
        return min(max(begin - now, MIN_DELAY_S), MAX_DELAY_S)
