"""How often an engine looks at its load, and when it reports."""

from __future__ import annotations

from common.types import LOAD_INTERVAL_S, WorkerLoad
from engine.process import IDLE_POLL_S, _LoadReporter


def test_load_is_looked_at_once_an_interval_and_reported_if_it_has_changed() -> None:
    reporter, num_looks, num_running = _LoadReporter(), 0, 0

    def look() -> WorkerLoad:
        nonlocal num_looks
        num_looks += 1
        return WorkerLoad(num_requests_running=num_running)

    def due(now: float) -> int | None:
        load = reporter.due(look, now)
        return None if load is None else load.num_requests_running

    assert due(0.0) == 0, "at once"
    assert reporter.ms_until_due(0.0) == 1000 * IDLE_POLL_S
    num_running = 3
    later = LOAD_INTERVAL_S / 2
    assert (due(later), num_looks) == (None, 1)
    assert reporter.ms_until_due(later) <= 500 * LOAD_INTERVAL_S, "the engine wakes to look again"
    assert (due(LOAD_INTERVAL_S), num_looks) == (3, 2)
    assert (due(2 * LOAD_INTERVAL_S), num_looks) == (None, 3), "nothing has changed"
    assert reporter.ms_until_due(2 * LOAD_INTERVAL_S) == 1000 * IDLE_POLL_S
