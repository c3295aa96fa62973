"""Which worker's role should change: pure, as the planner is.

    needs of both roles ── pressure ──> the shift that lowers it most ── long enough, worth it ──> one shift
    workers of both roles, and what they take now ─────┘

A worker that takes both kinds of work counts half for each. A role's pressure is what it needs divided by the workers
that it has; the greater one decides. A shift is free and takes a moment, and a pod is neither. So roles move first, and
pods are asked for by what the fleet needs as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.types import WorkerRole
from router.autoscaler.signals import FleetSignals, MovableWorker, ScaleDecision

_SHARES = {WorkerRole.PREFILL: (1.0, 0.0), WorkerRole.DECODE: (0.0, 1.0), WorkerRole.BOTH: (0.5, 0.5)}
"""How much of a worker of both roles each role has, by what it takes."""


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
    """What each role needs, and has."""

    needs: tuple[float, float]
    has: tuple[float, float]

    @property
    def pressure(self) -> float:
        return max(map(_ratio, self.needs, self.has))

    def after(self, before: WorkerRole, role: WorkerRole) -> _Split:
        prefill, decode = (
            have - old + new for have, old, new in zip(self.has, _SHARES[before], _SHARES[role], strict=True)
        )
        return _Split(self.needs, (prefill, decode))

    def words(self) -> str:
        return (
            f"prefill needs {self.needs[0]:.2f} workers and has {self.has[0]:g}, "
            f"decode needs {self.needs[1]:.2f} and has {self.has[1]:g}"
        )


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
                if role is before or min(after.has) <= 0:
                    continue  # one that takes prompts, and one that takes requests, are left at any time
                if after.pressure > now.pressure * (1 - self._options.gain):
                    continue
                # Of equals a worker for one role: beside another's prompts its answers would take longer.
                shift = Shift(worker, role, f"{now.words()}; then {after.has[0]:g} and {after.has[1]:g}")
                found = after.pressure, role is WorkerRole.BOTH, shift
                if best is None or found[:2] < best[:2]:
                    best = found
        return None if best is None else best[2]


def _split(
    decisions: Mapping[WorkerRole, ScaleDecision], signals: FleetSignals, movable: Sequence[MovableWorker]
) -> _Split:
    takes = [worker.role for worker in movable]
    prefill = signals.prefill.num_ready - len(takes) + takes.count(WorkerRole.DECODE)  # that have this role alone
    decode = signals.decode.num_ready - len(takes) + takes.count(WorkerRole.PREFILL)
    return _Split(
        (decisions[WorkerRole.PREFILL].needed, decisions[WorkerRole.DECODE].needed),
        (
            max(prefill, 0) + sum(_SHARES[role][0] for role in takes),
            max(decode, 0) + sum(_SHARES[role][1] for role in takes),
        ),
    )


def _ratio(need: float, has: float) -> float:
    if has:
        return need / has
    return math.inf if need else 0.0
