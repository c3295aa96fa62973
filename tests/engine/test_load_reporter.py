"""How often an engine looks at its load, and when it reports."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import LOAD_INTERVAL_S, WorkerLoad
from engine import messages as m
from engine.process import IDLE_POLL_S, _LoadReporter


@dataclass
class Core:
    num_running: int = 0
    num_looks: int = 0
    counted: tuple[int, ...] = ()

    @property
    def load(self) -> WorkerLoad:
        self.num_looks += 1
        return WorkerLoad(num_requests_running=self.num_running)

    def take_counted(self) -> tuple[int, ...]:
        counted, self.counted = self.counted, ()
        return counted


def test_load_is_looked_at_once_an_interval_and_reported_if_it_has_changed() -> None:
    reporter, core = _LoadReporter(), Core()

    def due(now: float) -> int | None:
        reported = reporter.due(core, now)
        return reported[0].load.num_requests_running if reported else None  # type: ignore[union-attr]

    assert due(0.0) == 0, "at once"
    assert reporter.ms_until_due(0.0) == 1000 * IDLE_POLL_S
    core.num_running = 3
    later = LOAD_INTERVAL_S / 2
    assert (due(later), core.num_looks) == (None, 1)
    assert reporter.ms_until_due(later) <= 500 * LOAD_INTERVAL_S, "the engine wakes to look again"
    assert (due(LOAD_INTERVAL_S), core.num_looks) == (3, 2)
    assert (due(2 * LOAD_INTERVAL_S), core.num_looks) == (None, 3), "nothing has changed"
    assert reporter.ms_until_due(2 * LOAD_INTERVAL_S) == 1000 * IDLE_POLL_S


def test_newcomers_are_named_once_with_the_load_that_counts_them_even_if_it_is_the_same() -> None:
    reporter, core = _LoadReporter(), Core(num_running=1)
    reporter.due(core, 0.0)
    core.counted = (7,)  # it came as another one ended
    assert reporter.due(core, LOAD_INTERVAL_S / 2) == []
    core.counted = (7, 8)
    assert reporter.due(core, LOAD_INTERVAL_S) == [m.LoadChanged(WorkerLoad(num_requests_running=1), (7, 8))]
    assert reporter.due(core, 2 * LOAD_INTERVAL_S) == []
