"""The planner in a simulation: what it sees each second, and what it decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.types import WorkerLoad, WorkerRole
from router.autoscaler.arrivals import ArrivalRate
from router.autoscaler.fleet_load import kv_usage
from router.autoscaler.planner import Planner, PlannerOptions
from router.autoscaler.rules import TargetRules, Targets
from router.autoscaler.signals import FleetSignals, RoleSignals

PLAN_S = 1.0  # from decision to decision


@dataclass(slots=True, frozen=True, kw_only=True)
class ScalingOptions:
    planner: PlannerOptions = field(default_factory=PlannerOptions)
    targets: Targets = field(default_factory=Targets)
    startup_s: float = 30.0  # from asking for a worker until it serves, which are paid
    window_s: float = 60.0  # over which arrivals are averaged


class Scaling:
    def __init__(self, options: ScalingOptions, prompt_rates: Mapping[WorkerRole, float]) -> None:
        """`prompt_rates`: prompt tokens a second of one worker, as its model of time says."""
        self.history: list[tuple[float, dict[WorkerRole, int]]] = []  # each change: when, and what is wanted since
        self._planner = Planner(options.planner, TargetRules(options.targets))
        self._arrivals = ArrivalRate(options.window_s)
        self._prompt_rates = prompt_rates

    def decide(
        self, now: float, loads: Mapping[WorkerRole, Sequence[WorkerLoad]], arrived_tokens: int
    ) -> Mapping[WorkerRole, int]:
        """How many workers of each role there should be. `loads`: of those that serve and do not drain."""
        self._arrivals.add(now, arrived_tokens)
        signals = FleetSignals(
            prefill=self._signals(WorkerRole.PREFILL, loads[WorkerRole.PREFILL]),
            decode=self._signals(WorkerRole.DECODE, loads[WorkerRole.DECODE]),
            arrival_tokens_per_s=self._arrivals.rate(),
            arrived_tokens=float(arrived_tokens),
        )
        wanted = {role: decision.desired for role, decision in self._planner.step(now, signals).items()}
        if not self.history or self.history[-1][1] != wanted:
            self.history.append((now, wanted))
        return wanted

    def _signals(self, role: WorkerRole, loads: Iterable[WorkerLoad]) -> RoleSignals:
        loads = list(loads)
        return RoleSignals(
            num_ready=len(loads),
            num_requests=sum(one.num_requests_running + one.num_requests_waiting for one in loads),
            queued_tokens=sum(one.num_queued_prompt_tokens for one in loads),
            num_busy=sum(one.num_queued_prompt_tokens > 0 for one in loads),
            kv_used=sum(map(kv_usage, loads)),
            predicted_rate=self._prompt_rates.get(role),
        )
