"""What `bench.decide` compares, with which traffic; and a simulation of it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from common.config import SimulateSettings
from common.errors import ConfigError
from common.percentiles import percentile
from common.targets import LatencyTargets
from common.traffic.requests import TrafficRequest
from common.traffic.traces import read_trace, repeated, scaled
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Fleet as RouterFleet
from router.policy import routing
from router.policy.base import RoutingDecision, RoutingRequest
from simulation.fleet import Fleet
from simulation.outcome import RequestOutcome
from simulation.scenario import fleet_options, scenarios

KINDS = {"chat": (1, 3000, 1 / 8), "long": (12_000, 48_000, 1 / 16)}
"""Prompts of so many tokens in the trace, and by how much all their lengths are scaled."""
WORKLOADS: dict[str, Sequence[str]] = {"chats": ("chat",), "long prompts": ("long",), "mixed": ("chat", "long")}
TTFT_TIMES, TPOT_TIMES = 4.0, 2.5  # of a request that is alone
PASSES = 3  # in which the oracle learns whom not to let in


@dataclass(slots=True, frozen=True)
class Way:
    name: str
    is_split: bool  # half of the workers prefill, half decode; else all have both roles
    queue_policy: str
    router: str = ""  # `decide_as`
    has_targets: bool = False  # requests say when they are due
    slo_late: str = "best-effort"


WAYS = (
    Way("two of both", False, "fcfs", "in tokens"),
    Way("always remote", True, "fcfs", "always remote"),
    Way("rule in tokens", True, "fcfs", "in tokens"),
    Way("by the model", True, "auto", has_targets=True),
)
LATE_WAYS = (
    Way("by arrival", False, "fcfs"),
    Way("by slack", False, "slo", has_targets=True),
    Way("by slack, refusing", False, "slo", has_targets=True, slo_late="refuse"),
)

_PICK, _KNOW_TIMES = routing.RoutingPolicy.pick, vars(routing)["all_know_their_times"]


def decide_as(name: str) -> None:
    """Has the routers of this process decide `in tokens`, or so and `always remote`; if empty, in their own way."""
    vars(routing)["all_know_their_times"] = (lambda _: False) if name else _KNOW_TIMES
    pick = _always_remote if name == "always remote" else _PICK
    routing.RoutingPolicy.pick = pick  # type: ignore[assignment,method-assign]


def _always_remote(
    policy: routing.RoutingPolicy, request: RoutingRequest, workers: RouterFleet | Sequence[Endpoint]
) -> RoutingDecision:
    decision = _PICK(policy, request, workers)
    return msgspec.structs.replace(decision, in_place=False, min_remote_tokens=1) if decision.prefill else decision


# ------------------------------------------------------------------------------------------------------------- traffic


def traffic(trace: Path) -> dict[str, list[TrafficRequest]]:
    """Requests of each workload; a request's tenant is its kind. Raises `ConfigError`."""
    found: dict[str, list[TrafficRequest]] = {name: [] for name in WORKLOADS}
    for request in read_trace(trace):
        for kind, (least, most, lengths) in KINDS.items():
            if least <= request.num_prompt_tokens < most:
                own = [*scaled([replace(request, tenant=kind)], lengths=lengths)]
                for workload in [name for name, kinds in WORKLOADS.items() if kind in kinds]:
                    found[workload] += own
    if not all(found.values()):
        raise ConfigError("trace", f"{trace}: lacks prompts of a kind: {KINDS}")
    return found


def piece(requests: Sequence[TrafficRequest], num: int, number: int, rate: float) -> list[TrafficRequest]:
    """`num` requests, others for each `number`, as far apart as in the trace but `rate` a second on average."""
    first = number * num % len(requests)
    taken = [*itertools.islice(repeated(requests, first + num), first, None)]
    start, span = taken[0].at, max(taken[-1].at - taken[0].at, 1e-9)
    return [replace(one, at=(one.at - start) / span * (num - 1) / rate) for one in taken]


@dataclass(slots=True, frozen=True)
class Answer:
    """To a request that was not refused. Seconds."""

    ttft_s: float
    tpot_s: float | None  # None: of one token
    gaps_s: Sequence[float] = ()  # from token to token, of real ones

    def is_late(self, targets: LatencyTargets) -> tuple[bool, bool]:
        """(first token, time per token)"""
        ttft_ms, tpot_ms = targets.ttft_ms or 0.0, targets.tpot_ms or 0.0
        return 1000 * self.ttft_s > ttft_ms, 1000 * (self.tpot_s or 0.0) > tpot_ms

    def is_in_time(self, targets: LatencyTargets) -> bool:
        return not any(self.is_late(targets))


def targets_of(alone: Mapping[str, Sequence[Answer]]) -> dict[str, LatencyTargets]:
    """By kind, from answers to requests that were alone."""
    found = {}
    for kind, answers in alone.items():
        ttft_s = percentile(sorted(one.ttft_s for one in answers), 0.5)
        tpot_s = percentile(sorted(one.tpot_s for one in answers if one.tpot_s is not None), 0.5)
        found[kind] = LatencyTargets(1000 * TTFT_TIMES * ttft_s, 1000 * TPOT_TIMES * tpot_s)
    return found


# ----------------------------------------------------------------------------------------------------------- simulated


class Simulation:
    def __init__(self, settings: SimulateSettings, folder: Path) -> None:
        """`settings`: all but the fleet. `folder` is for files."""
        self._settings = settings
        self._limits = folder / "limits.json"  # which is YAML, too
        self.targets: dict[str, LatencyTargets] = {}  # by kind

    def run(self, way: Way, size: int, requests: Sequence[TrafficRequest]) -> list[RequestOutcome]:
        """What becomes of each request with `size` workers."""
        half = size // 2
        numbers = (
            {"prefill": half, "decode": half, "both": 0} if way.is_split else {"prefill": 0, "decode": 0, "both": size}
        )
        options: dict[str, object] = {**numbers, "queue_policy": way.queue_policy, "slo_late": way.slo_late}
        if way.has_targets:
            slo = {kind: {"ttft_ms": one.ttft_ms, "tpot_ms": one.tpot_ms} for kind, one in self.targets.items()}
            self._limits.write_text(json.dumps({"tenants": {kind: {"slo": one} for kind, one in slo.items()}}))
            options["limits_file"] = str(self._limits)
        settings = self._settings.model_copy(update=options)
        decide_as(way.router)
        try:
            return [*Fleet(fleet_options(settings, scenarios(settings)[0])).run(requests).requests]
        finally:
            decide_as("")

    def capacity(self, size: int, requests: Sequence[TrafficRequest], num: int) -> float:
        """Requests a second that `size` workers of both roles serve if `num` come at once."""
        together = [replace(one, at=0.0) for one in itertools.islice(repeated(requests, num), num)]
        return num / max(one.at + one.e2e_s for one in self.run(WAYS[0], size, together))

    def alone(self, requests: Sequence[TrafficRequest]) -> list[Answer]:
        outcomes = [self.run(WAYS[0], 2, [replace(one, at=0.0)])[0] for one in requests]
        return [Answer(one.ttft_s, one.tpot_s) for one in outcomes if one.ttft_s is not None]

    def in_time(self, requests: Sequence[TrafficRequest], outcomes: Sequence[RequestOutcome]) -> list[bool]:
        return [
            not one.failure
            and one.ttft_s is not None
            and Answer(one.ttft_s, one.tpot_s).is_in_time(self.targets[request.tenant])
            for request, one in zip(requests, outcomes, strict=True)
        ]

    def oracle(self, way: Way, size: int, requests: Sequence[TrafficRequest], in_time: Sequence[bool]) -> int:
        """How many are in time if it is known beforehand how long answers are, and who will be late: in each pass, half
        of those that were late in the one before are not let in. `in_time`: in the first pass."""
        draw, most, left = random.Random(1), sum(in_time), list(requests)
        for _ in range(PASSES):
            left = [one for one, good in zip(left, in_time, strict=True) if good or draw.random() < 0.5]
            in_time = self.in_time(left, self.run(way, size, left))
            most = max(most, sum(in_time))
        return most
