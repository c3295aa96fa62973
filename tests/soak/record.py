"""What a soak keeps: answers' times, processes' memory, what was done to whom; and what is asked of them in the end."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.memory import anonymous_mb, processes
from tests.integration.stack import Fleet
from tests.soak.traffic import Latencies

FULL_S = 1800.0  # a run that is shorter has not come to rest: what needs time is shown, and not judged
WARM_SHARE = 1 / 6  # of the run: then processes have the size that they keep
WINDOW_SHARE = 1 / 12  # over which memory's median is taken
MAX_GROWTH_PERCENT = 2.0
MAX_P99_RATIO = 1.3


@dataclass(slots=True)
class Life:
    """One process, from when it was first seen."""

    name: str
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds of the run, MiB


@dataclass(slots=True, frozen=True)
class Criterion:
    what: str
    value: float | None
    limit: float
    is_judged: bool

    @property
    def ok(self) -> bool:
        return not self.is_judged or (self.value is not None and self.value <= self.limit)

    def __str__(self) -> str:
        verdict = ("ok" if self.ok else "NOT MET") if self.is_judged else "not judged, the run is too short"
        return f"{self.what}: {'?' if self.value is None else f'{self.value:.2f}'}, limit {self.limit:g}: {verdict}"


class Record:
    """Times are seconds since the load began."""

    def __init__(self, seconds: float) -> None:
        self.begin = time.monotonic()
        self.seconds = seconds
        self.events: list[tuple[float, str]] = []
        self.load_average: list[tuple[float, float]] = []
        self._lives: dict[int, Life] = {}

    @property
    def now(self) -> float:
        return time.monotonic() - self.begin

    def event(self, what: str) -> None:
        self.events.append((round(self.now, 1), what))

    def look(self, fleet: Fleet) -> None:
        self.load_average.append((round(self.now, 1), os.getloadavg()[0]))
        for name, pid in processes(fleet):
            held_mb = anonymous_mb(pid)
            if held_mb is not None:
                self._lives.setdefault(pid, Life(name)).memory.append((round(self.now, 1), round(held_mb, 2)))

    def lives(self) -> dict[str, Life]:
        """By name; `#2` and so on are those that were started after the former was killed."""
        named: dict[str, Life] = {}
        for life in self._lives.values():
            number = sum(name.partition(" #")[0] == life.name for name in named) + 1
            named[life.name if number == 1 else f"{life.name} #{number}"] = life
        return named

    def growth_percent(self) -> dict[str, float]:
        """Of processes that lived from the warm moment to the end, by name."""
        warm, window = WARM_SHARE * self.seconds, WINDOW_SHARE * self.seconds
        found = {}
        for name, life in self.lives().items():
            before = [mb for at, mb in life.memory if warm <= at < warm + window]
            after = [mb for at, mb in life.memory if self.seconds - window <= at <= self.seconds]
            if life.memory[0][0] <= warm and before and after:
                found[name] = round(100 * (statistics.median(after) / statistics.median(before) - 1), 2)
        return found

    def p99_by_third(self, latencies: Latencies) -> list[float | None]:
        thirds: list[list[float]] = [[], [], []]
        for at, waited in latencies.found:
            thirds[min(int(3 * (at - self.begin) / self.seconds), 2)].append(waited)
        return [percentile(third, 0.99) for third in thirds]

    def by_minute(self, latencies: Latencies) -> list[dict[str, float | None]]:
        minutes: dict[int, list[float]] = {}
        for at, waited in latencies.found:
            minutes.setdefault(int((at - self.begin) // 60), []).append(waited)
        return [
            {
                "minute": minute,
                "answers": len(found),
                "p50_s": percentile(found, 0.5),
                "p99_s": percentile(found, 0.99),
            }
            for minute, found in sorted(minutes.items())
        ]

    def criteria(self, latencies: Latencies, num_bad: int) -> list[Criterion]:
        is_full = self.seconds >= FULL_S
        growth = [
            Criterion(f"growth of {name} after the warm-up, %", percent, MAX_GROWTH_PERCENT, is_full)
            for name, percent in self.growth_percent().items()
        ]
        first, _, last = self.p99_by_third(latencies)
        ratio = last / first if first and last else None
        return [
            Criterion("wrong and lost answers", num_bad, 0, True),
            Criterion("p99 of the last third of the run to that of the first", ratio, MAX_P99_RATIO, is_full),
            *(growth or [Criterion("growth of a process that lived through, %", None, MAX_GROWTH_PERCENT, is_full)]),
        ]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of all values do not exceed; None if there are no values."""
    if not values:
        return None
    return round(sorted(values)[min(int(share * len(values)), len(values) - 1)], 4)
