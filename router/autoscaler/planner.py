"""How many workers each role should have: pure, so that a recorded day can be planned again in a second.

    signals ── rules ──> need ── tolerance ──> rounded ── min, max, zero ──> wanted ── windows ──> desired

The windows work as those of a HorizontalPodAutoscaler: replicas go up to what was wanted all through the last
`scale_up_delay_s`, and down to the most that was wanted within the last `scale_down_delay_s`. If rules say how many
workers are plenty, those beyond the most of that within `PLENTY_S` go at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.types import WorkerRole
from router.autoscaler.rules import Needs, Rules
from router.autoscaler.signals import ROLES, FleetSignals, Need, ScaleDecision

PLENTY_S = 5.0
_EPSILON = 1e-9  # 3.0000000001 workers are 3


@dataclass(slots=True, frozen=True)
class Bounds:
    """Fewest and most workers of one role. `fewest` 0 allows none at all while nobody asks for anything."""

    fewest: int
    most: int


@dataclass(slots=True, frozen=True, kw_only=True)
class PlannerOptions:
    prefill: Bounds = Bounds(1, 10)
    decode: Bounds = Bounds(1, 10)
    both: Bounds | None = None  # of workers whose roles move; None: roles stay, and there is no decision about them
    tolerance: float = 0.1  # share of the present number within which nothing changes
    scale_up_delay_s: float = 3.0
    scale_down_delay_s: float = 120.0
    idle_timeout_s: float = 300.0  # without a request, before the last worker goes

    def bounds(self, role: WorkerRole) -> Bounds:
        return {WorkerRole.PREFILL: self.prefill, WorkerRole.DECODE: self.decode}.get(role) or self.both or Bounds(0, 0)


@dataclass(slots=True)
class _Role:
    desired: int
    # When, how many were wanted, and how many were plenty; oldest first.
    wanted: deque[tuple[float, int, float]] = field(default_factory=deque)


class Planner:
    """One for the life of a process: it remembers what was wanted lately."""

    def __init__(self, options: PlannerOptions, rules: Rules) -> None:
        self._options = options
        self._rules = rules
        self._roles: dict[WorkerRole, _Role] = {}
        self._last_busy: float | None = None

    def adopt(self, now: float, role: WorkerRole, replicas: int) -> None:
        """Takes `replicas` as what is desired so far: what the cluster has, at start or after somebody changed it."""
        self._roles[role] = _Role(replicas, deque([(now, replicas, math.inf)]))

    def step(self, now: float, signals: FleetSignals) -> Mapping[WorkerRole, ScaleDecision]:
        """Decides anew. `now` in seconds, never decreasing. Roles that were not adopted start from what is there."""
        if signals.is_busy or self._last_busy is None:
            self._last_busy = now
        needs = self._rules.needs(now, signals)
        decisions: dict[WorkerRole, ScaleDecision] = {}
        for role in ROLES:
            if role not in self._roles:
                self.adopt(now, role, signals.of(role).num_workers)
            need = needs.prefill if role is WorkerRole.PREFILL else needs.decode
            hold = role is WorkerRole.DECODE and decisions[WorkerRole.PREFILL].desired > signals.prefill.num_ready
            decisions[role] = self._decide(now, role, signals, need, hold_down=hold)
        if self._options.both is not None:
            if WorkerRole.BOTH not in self._roles:
                self.adopt(now, WorkerRole.BOTH, signals.both.num_workers)
            hold = needs.prefill.workers > signals.prefill.num_ready
            decisions[WorkerRole.BOTH] = self._decide(
                now, WorkerRole.BOTH, signals, _of_both(needs, signals), hold_down=hold
            )
        return decisions

    def _decide(
        self, now: float, role: WorkerRole, signals: FleetSignals, need: Need, *, hold_down: bool
    ) -> ScaleDecision:
        """`hold_down`: prefill is short of workers, so that decode's load is less than what is coming."""
        state = self._roles[role]
        previous = state.desired
        reasons = [f"{need.workers:.2f} workers: {need.reason}"]
        wanted = self._rounded(need, previous, reasons)
        if hold_down and wanted < previous:
            wanted = previous
            reasons.append("prefill is short of workers, decode's load is still to come")
        wanted = self._bounded(now, role, signals, wanted, reasons)

        if previous == 0 and wanted > 0:
            state.wanted.clear()  # somebody waits for the first worker
        plenty = math.inf if need.plenty is None or need.unknown else math.ceil(need.plenty - _EPSILON)
        if hold_down:
            plenty = max(plenty, previous)
        state.wanted.append((now, wanted, max(plenty, wanted)))
        state.desired = self._stabilized(now, state, reasons)
        return ScaleDecision(
            role=role, desired=state.desired, previous=previous, needed=need.workers, reasons=tuple(reasons)
        )

    def _rounded(self, need: Need, previous: int, reasons: list[str]) -> int:
        workers = need.workers
        if need.unknown:
            # Silent workers may be full or empty: neither is taken for granted.
            most = workers + need.unknown
            workers = workers if workers > previous else min(most, previous)
            reasons.append(f"{need.unknown:g} workers are silent: between {need.workers:.2f} and {most:.2f}")
        if previous and not need.exact and abs(workers / previous - 1) <= self._options.tolerance:
            return previous
        return math.ceil(workers - _EPSILON)

    def _bounded(self, now: float, role: WorkerRole, signals: FleetSignals, wanted: int, reasons: list[str]) -> int:
        bounds = self._options.bounds(role)
        fewest = bounds.fewest
        if fewest == 0:
            idle_s = now - (self._last_busy if self._last_busy is not None else now)
            if signals.is_busy:
                fewest = 1
            elif wanted == 0 and idle_s < self._options.idle_timeout_s and self._roles[role].desired > 0:
                fewest = 1
                reasons.append(f"idle for {idle_s:.0f} s, of {self._options.idle_timeout_s:g} s before zero")
        if wanted < fewest:
            reasons.append(f"at least {fewest}")
            return fewest
        if wanted > bounds.most:
            reasons.append(f"at most {bounds.most}")
            return bounds.most
        return wanted

    def _stabilized(self, now: float, state: _Role, reasons: list[str]) -> int:
        options = self._options
        longest = max(options.scale_up_delay_s, options.scale_down_delay_s)
        while state.wanted and state.wanted[0][0] < now - longest:
            state.wanted.popleft()
        up = min(wanted for at, wanted, _ in state.wanted if at >= now - options.scale_up_delay_s)
        down = max(wanted for at, wanted, _ in state.wanted if at >= now - options.scale_down_delay_s)
        plenty = max(plenty for at, _, plenty in state.wanted if at >= now - PLENTY_S)
        latest = state.wanted[-1][1]
        if state.desired < up:
            return up
        if state.desired > plenty and down > plenty:
            reasons.append(f"{plenty:.0f} were plenty for {PLENTY_S:g} s")
            return int(plenty)
        if state.desired > down:
            return down
        if latest > state.desired:
            reasons.append(f"wants {latest}, not for {options.scale_up_delay_s:g} s yet")
        elif latest < state.desired:
            reasons.append(f"wants {latest}, not for {options.scale_down_delay_s:g} s yet")
        return state.desired


def _of_both(needs: Needs, signals: FleetSignals) -> Need:
    """How many workers there should be whose roles move: for these, only the fleet as a whole can be short.

    A ready worker of one role takes its share of that role's need off them, and never any of the other's, however
    little it has to do.
    """
    prefill, decode = needs.prefill, needs.decode
    fixed_prefill, fixed_decode = signals.prefill.num_fixed, signals.decode.num_fixed
    fixed = f", less {fixed_prefill} and {fixed_decode} of one role" if fixed_prefill or fixed_decode else ""
    plenty = None
    if prefill.plenty is not None and decode.plenty is not None:
        plenty = max(prefill.plenty - fixed_prefill, 0.0) + max(decode.plenty - fixed_decode, 0.0)
    return Need(
        max(prefill.workers - fixed_prefill, 0.0) + max(decode.workers - fixed_decode, 0.0),
        f"{prefill.workers:.2f} for prefill and {decode.workers:.2f} for decode, whose roles move{fixed}",
        unknown=float(signals.both.num_silent) if prefill.unknown or decode.unknown else 0.0,
        exact=prefill.exact and decode.exact,
        plenty=plenty,
    )
