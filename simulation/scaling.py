"""The planner in a simulation: what it sees each second, and what it decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.batch_time import BatchTime
from common.types import WorkerLoad, WorkerRole
from router.autoscaler.arrivals import ArrivalRate
from router.autoscaler.fleet_load import ModelTime, Totals, kv_usage, prompt_rate
from router.autoscaler.model_rules import LatencyGoal, ModelRules
from router.autoscaler.planner import Planner, PlannerOptions
from router.autoscaler.roles import RoleOptions, RolePlanner, Shift
from router.autoscaler.rules import Rules, TargetRules, Targets
from router.autoscaler.signals import FleetSignals, MovableWorker, RoleSignals

PLAN_S = 1.0  # from decision to decision


@dataclass(slots=True, frozen=True, kw_only=True)
class ScalingOptions:
    planner: PlannerOptions = field(default_factory=PlannerOptions)
    targets: Targets = field(default_factory=Targets)
    goal: LatencyGoal | None = None  # None: signals alone decide
    roles: RoleOptions | None = None  # how workers' roles move; None: they stay
    adds: bool = True  # workers come and go; else only roles move
    startup_s: float = 30.0  # from asking for a worker until it serves, which are paid
    window_s: float = 60.0  # over which arrivals are averaged


class Scaling:
    def __init__(self, options: ScalingOptions, times: Mapping[WorkerRole, BatchTime]) -> None:
        """`times`: the workers' models of time."""
        self.history: list[tuple[float, dict[WorkerRole, int]]] = []  # each change: when, and what is wanted since
        rules: Rules = TargetRules(options.targets)
        if options.goal is not None:
            rules = ModelRules(options.goal, rules)
        self._planner = Planner(options.planner, rules)
        self._roles = None if options.roles is None else RolePlanner(options.roles)
        self.shifts: list[tuple[float, Shift]] = []  # each, and when
        self._arrivals = ArrivalRate(options.window_s)
        self._prompt_rates = {role: prompt_rate(time) for role, time in times.items()}
        self._times = {role: ModelTime(time) for role, time in times.items()}

    def decide(
        self,
        now: float,
        loads: Mapping[WorkerRole, Sequence[WorkerLoad]],
        arrived: Totals,
        movable: Sequence[MovableWorker] = (),
    ) -> tuple[Mapping[WorkerRole, int], Shift | None]:
        """How many workers of each role there should be, and which one takes another role now. `loads`: of those that
        serve and do not drain, by what they take. `movable`: those of them whose roles move."""
        self._arrivals.add(now, arrived.prompt_tokens)
        signals = FleetSignals(
            prefill=self._signals(WorkerRole.PREFILL, loads[WorkerRole.PREFILL]),
            decode=self._signals(WorkerRole.DECODE, loads[WorkerRole.DECODE]),
            both=RoleSignals(num_ready=len(movable)),
            arrival_tokens_per_s=self._arrivals.rate(),
            arrived_tokens=float(arrived.prompt_tokens),
            arrived_requests=float(arrived.requests),
            answered_tokens=float(arrived.answer_tokens),
        )
        decisions = self._planner.step(now, signals)
        wanted = {role: decision.desired for role, decision in decisions.items()}
        shift = None if self._roles is None else self._roles.step(now, decisions, signals, movable)
        if shift is not None:
            self.shifts.append((now, shift))
        if not self.history or self.history[-1][1] != wanted:
            self.history.append((now, wanted))
        return wanted, shift

    def _signals(self, role: WorkerRole, loads: Iterable[WorkerLoad]) -> RoleSignals:
        loads = list(loads)
        return RoleSignals(
            num_ready=len(loads),
            num_requests=sum(one.num_requests_running + one.num_requests_waiting for one in loads),
            queued_tokens=sum(one.num_queued_prompt_tokens for one in loads),
            num_busy=sum(one.num_queued_prompt_tokens > 0 for one in loads),
            kv_used=sum(map(kv_usage, loads)),
            predicted_rate=self._prompt_rates.get(role),
            times=(self._times[role],) if role in self._times else (),
        )
