"""Progress of a long load: a bar on a terminal, else a log line now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0


class Progress:
    """Counts up to `total`, in `unit`s. Leave the context when the load has ended, also if it failed."""

    def __init__(
        self,
        what: str,
        total: int,
        unit: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        log_interval_s: float = LOG_INTERVAL_S,
    ) -> None:
        """`stream` is standard error if None."""
        self._what, self._total = what, total
        self._clock, self._log_interval_s = clock, log_interval_s
        self._num_done = 0
        self._logged_at = clock()
        self._bar = tqdm(
            total=total, unit=unit, unit_scale=True, desc=what, disable=None, leave=False, file=stream, mininterval=0.1
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, amount: int = 1) -> None:
        self._num_done += amount
        self._bar.update(amount)
        if self._bar.disable and (now := self._clock()) - self._logged_at >= self._log_interval_s:
            self._logged_at = now
            log.info(self._what, extra={"percent": 100 * self._num_done // self._total})
