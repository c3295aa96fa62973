"""Which worker's role should change: pure, as the planner is.

    needs of both roles ── pressure ──> the shift that lowers it most ── long enough, worth it ──> one shift
    workers of both roles, and what they take now ─────┘

A role's pressure is what it needs divided by the workers that it has; the greater one decides. Workers that take both
kinds of work help the role that is short, as far as the other one leaves them time. A shift is free and takes a moment,
and a pod is neither. So roles move first, and pods are asked for by what the fleet needs as a whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from common.types import WorkerRole
from router.autoscaler.signals import FleetSignals, MovableWorker, ScaleDecision

MIXED = 0.9  # of a worker's time that is of use if it takes both kinds of work: they are in each other's way


@dataclass(slots=True, frozen=True, kw_only=True)
class RoleOptions:
    interval_s: float = 30.0  # from one shift to the next; what the last one left behind has ended by then
    delay_s: float = 3.0  # for so long a shift of the same kind must have been the best
    gain: float = 0.1  # share of the greater pressure that a shift must take away


@dataclass(slots=True, frozen=True)
class Shift:
    worker: MovableWorker
    role: WorkerRole  # that it should take work of
    reason: str

    @property
    def words(self) -> str:
        return f"{self.worker.role.value} -> {self.role.value}"


@dataclass(slots=True, frozen=True)
class _Split:
    """What each role needs, and how many workers take what."""

    prefill_need: float
    decode_need: float
    numbers: Mapping[WorkerRole, int]

    @property
    def pressure(self) -> float:
        """With the time of mixed workers where it helps most."""
        prefill, decode = self.numbers[WorkerRole.PREFILL], self.numbers[WorkerRole.DECODE]
        mixed, need = MIXED * self.numbers[WorkerRole.BOTH], self.prefill_need + self.decode_need
        if not need:
            return 0.0
        to_prefill = (
            self.prefill_need * (decode + mixed) - self.decode_need * prefill
        ) / need  # both are as short then
        to_prefill = min(max(to_prefill, 0.0), mixed)
        return max(
            _ratio(self.prefill_need, prefill + to_prefill), _ratio(self.decode_need, decode + mixed - to_prefill)
        )

    @property
    def has_both(self) -> bool:
        """Whether some worker takes prompts, and some takes requests."""
        mixed = self.numbers[WorkerRole.BOTH]
        return bool(self.numbers[WorkerRole.PREFILL] + mixed and self.numbers[WorkerRole.DECODE] + mixed)

    def after(self, before: WorkerRole, role: WorkerRole) -> _Split:
        numbers = {**self.numbers, before: self.numbers[before] - 1}
        return replace(self, numbers={**numbers, role: numbers[role] + 1})

    def words(self) -> str:
        return ", ".join(f"{number} {role.value}" for role, number in self.numbers.items())


class RolePlanner:
    """One for the life of a process."""

    def __init__(self, options: RoleOptions) -> None:
        self._options = options
        self._last_at = -math.inf  # when a role was changed, or this process began to decide
        self._wanted: tuple[WorkerRole, WorkerRole] | None = None  # the kind of shift that is the best
        self._wanted_since = 0.0

    def adopt(self, now: float) -> None:
        """Leaves things as they are for a while: another process may have decided until now."""
        self._last_at, self._wanted = now, None

    def step(
        self,
        now: float,
        decisions: Mapping[WorkerRole, ScaleDecision],
        signals: FleetSignals,
        movable: Sequence[MovableWorker],
    ) -> Shift | None:
        """The shift that is due; the caller carries it out. `now` in seconds, never decreasing. `movable`: those that
        report and take work."""
        found = self._best(decisions, signals, movable)
        kind = None if found is None else (found.worker.role, found.role)
        if kind != self._wanted:
            self._wanted, self._wanted_since = kind, now
        if found is None or now - self._wanted_since < self._options.delay_s:
            return None
        if now - self._last_at < self._options.interval_s:
            return None
        self.adopt(now)
        return found

    def _best(
        self, decisions: Mapping[WorkerRole, ScaleDecision], signals: FleetSignals, movable: Sequence[MovableWorker]
    ) -> Shift | None:
        now = _split(decisions, signals, movable)
        if now.pressure <= 1 + 1e-9:
            return None
        # Of those that take the same, the one goes whose shift disturbs least.
        emptiest: dict[WorkerRole, MovableWorker] = {}
        for worker in sorted(movable, key=lambda one: one.num_requests):
            if not worker.is_pinned:
                emptiest.setdefault(worker.role, worker)
        best: tuple[float, bool, Shift] | None = None
        for before, worker in emptiest.items():
            for role in WorkerRole:
                after = now.after(before, role)
                if role is before or not after.has_both:
                    continue  # one that takes prompts, and one that takes requests, are left at any time
                if after.pressure > now.pressure * (1 - self._options.gain):
                    continue
                reason = (
                    f"prefill needs {now.prefill_need:.2f} workers and decode {now.decode_need:.2f}: {after.words()} "
                    f"instead of {now.words()}"
                )
                found = after.pressure, role is WorkerRole.BOTH, Shift(worker, role, reason)
                if best is None or found[:2] < best[:2]:
                    best = found
        return None if best is None else best[2]


def _split(
    decisions: Mapping[WorkerRole, ScaleDecision], signals: FleetSignals, movable: Sequence[MovableWorker]
) -> _Split:
    takes = Counter(worker.role for worker in movable)
    mixed = takes[WorkerRole.BOTH]
    return _Split(
        decisions[WorkerRole.PREFILL].needed,
        decisions[WorkerRole.DECODE].needed,
        {
            WorkerRole.PREFILL: max(signals.prefill.num_ready - mixed, takes[WorkerRole.PREFILL]),
            WorkerRole.DECODE: max(signals.decode.num_ready - mixed, takes[WorkerRole.DECODE]),
            WorkerRole.BOTH: mixed,
        },
    )


def _ratio(need: float, has: float) -> float:
    if has:
        return need / has
    return math.inf if need else 0.0
