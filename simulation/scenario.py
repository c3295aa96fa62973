"""From settings to fleets, traffic and results: one scenario for each fleet of a sweep and each policy."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from common.config import EngineSettings, SimulateSettings, TrafficSettings
from common.errors import ConfigError
from common.goodput import Goodput, parse_goodput
from common.targets import LatencyTargets
from common.traffic import arrivals, sizes
from common.traffic.made import conversations, independent, of_tenants
from common.traffic.requests import TrafficRequest
from common.traffic.traces import read_trace, repeated, scaled
from common.types import WorkerRole
from engine.simulated.data_sheet import SimulatedTime, simulated_time
from router.autoscaler.model_rules import latency_goal
from router.autoscaler.planner import Bounds, PlannerOptions
from router.autoscaler.roles import RoleOptions
from router.autoscaler.rules import Targets
from router.limits.quotas import read_limits
from router.policy.registry import create_policy
from simulation.admission import AdmissionOptions
from simulation.counted.fleet import CountedFleet
from simulation.fleet import Fleet
from simulation.fleet_base import FleetOptions
from simulation.link import LinkSpeed
from simulation.outcome import Outcome
from simulation.scaling import ScalingOptions
from simulation.step_times import HostTime

NUM_MADE = 1000  # requests, if nobody says how many
LONGEST = 16  # times the median, of lengths that are drawn
MAX_SCENARIOS = 1000


@dataclass(slots=True, frozen=True)
class Scenario:
    policy: str
    num_workers: dict[WorkerRole, int]

    @property
    def fleet(self) -> str:
        """As `2P + 4D`."""
        letters = {WorkerRole.PREFILL: "P", WorkerRole.DECODE: "D", WorkerRole.BOTH: "B"}
        return " + ".join(f"{num}{letters[role]}" for role, num in self.num_workers.items() if num)


@dataclass(slots=True, frozen=True)
class Result:
    scenario: Scenario
    outcome: Outcome
    figures: dict[str, float]  # `Outcome.summary`
    sources: tuple[str, ...] = ()  # where the times of steps are from, in words


def run(settings: SimulateSettings, progress: Callable[[int, int], None] = lambda _done, _all: None) -> list[Result]:
    """One result for each scenario. `progress` gets how many requests have ended, of how many. Raises `ConfigError` for
    what is wrong with settings or files."""
    planned, goodput = scenarios(settings), parse_goodput(settings.goodput, "goodput")
    options = [fleet_options(settings, one) for one in planned]
    requests = with_tenants(traffic(settings), settings)
    num = len(requests) * len(planned)

    def told(before: int, done: int) -> None:
        progress(before + done, num)

    results: list[Result] = []
    for number, (scenario, option) in enumerate(zip(planned, options, strict=True)):
        outcome = new_fleet(option).run(requests, partial(told, number * len(requests)))
        sources = dict.fromkeys(option.times[role].source for role, num in scenario.num_workers.items() if num)
        results.append(Result(scenario, outcome, outcome.summary(goodput), tuple(sources)))
    return results


def traffic(settings: TrafficSettings) -> list[TrafficRequest]:
    """The requests, in the order of time. Raises `ConfigError` for a flag that would change nothing."""
    of_trace, of_made = {"speed", "lengths"}, {"arrivals", "rate", "prompt_tokens", "output_tokens"}
    for name in sorted((of_trace if settings.trace is None else of_made) & settings.model_fields_set):
        reason = "means nothing without --trace" if settings.trace is None else "means nothing with --trace"
        raise ConfigError(name, reason)
    if settings.trace is not None:
        trace = read_trace(Path(settings.trace))
        if settings.requests is not None:
            trace = [*repeated(trace, settings.requests)]
        return [*scaled(trace, speed=settings.speed, lengths=settings.lengths)]
    return [*itertools.islice(_made(settings), settings.requests or NUM_MADE)]


def with_tenants(requests: list[TrafficRequest], settings: SimulateSettings) -> list[TrafficRequest]:
    """Each request, or each conversation, is one tenant's, drawn by their shares. Raises `ConfigError`."""
    if settings.tenants is None:
        return requests
    shares: dict[str, float] = {}
    for part in settings.tenants.split(","):
        name, _, share = part.strip().partition("=")
        found = re.fullmatch(r"\d+(\.\d+)?", share or "1")
        if not name or found is None or not float(found[0]):
            raise ConfigError("tenants", f"{part.strip()!r} is not a name and a share above 0, like web=3")
        if name in shares:
            raise ConfigError("tenants", f"{name} is given twice")
        shares[name] = float(found[0])
    return [*of_tenants(requests, shares, settings.seed)]


def _made(settings: TrafficSettings) -> Iterator[TrafficRequest]:
    rate, seed = settings.rate, settings.seed
    prompts = _lengths(settings.prompt_tokens, settings.length_sigma, f"prompts/{seed}")
    outputs = _lengths(settings.output_tokens, settings.length_sigma, f"outputs/{seed}")
    match settings.arrivals:
        case "conversations":
            return conversations(
                rate,
                prompts,
                outputs,
                seed,
                turns=settings.turns,
                think_s=settings.think_time,
                system_tokens=settings.shared_tokens,
                max_prompt_tokens=LONGEST * (settings.prompt_tokens + settings.output_tokens) + settings.shared_tokens,
            )
        case "gamma":
            times = arrivals.gamma(rate, settings.burstiness, seed)
        case "bursts":
            times = arrivals.bursts(rate, settings.burst_size, seed)
        case "steady":
            times = arrivals.steady(rate)
        case "ramp":
            times = arrivals.ramp(0.0, rate, settings.period, seed)
        case "day":
            times = arrivals.day(rate, settings.period, seed)
        case _:
            times = arrivals.poisson(rate, seed)
    return independent(times, prompts, outputs, num_shared_tokens=settings.shared_tokens)


def _lengths(median: int, sigma: float, seed: str) -> Iterator[int]:
    return sizes.lognormal(median, sigma, 1, LONGEST * median, seed) if sigma else sizes.fixed(median)


def scenarios(settings: SimulateSettings) -> list[Scenario]:
    """Every fleet of the sweep with every policy."""
    given = {WorkerRole.PREFILL: settings.prefill, WorkerRole.DECODE: settings.decode, WorkerRole.BOTH: settings.both}
    ranges = {role: [num] for role, num in given.items()}
    for part in (settings.sweep or "").split(","):
        if not part.strip():
            continue
        found = re.fullmatch(r"(prefill|decode|both)=(\d{1,4})(?:\.\.(\d{1,4}))?", part.strip())
        if found is None:
            raise ConfigError("sweep", f"{part.strip()!r} is not like prefill=1..8, decode=4 or both=0..2")
        first = int(found[2])
        last = int(found[3] or first)
        if last < first:
            raise ConfigError("sweep", f"{part.strip()!r} ends before it begins")
        ranges[WorkerRole(found[1])] = [*range(first, last + 1)]
    policies = [name.strip() for name in settings.policy.split(",") if name.strip()]
    num = len(policies) * math.prod(map(len, ranges.values()))
    if num > MAX_SCENARIOS:  # before they are made: a sweep may name 10^12
        raise ConfigError("sweep", f"{num} simulations at once; {MAX_SCENARIOS} at most")
    fleets = [dict(zip(ranges, numbers, strict=True)) for numbers in itertools.product(*ranges.values())]
    for fleet in fleets:
        if not fleet[WorkerRole.DECODE] + fleet[WorkerRole.BOTH]:
            raise ConfigError("decode", "a fleet needs a decode worker, or one of both roles")
    if settings.move_roles:
        for name in ("prefill_times", "decode_times"):
            if getattr(settings, name) is not None:
                raise ConfigError(name, "with --move-roles all workers are alike: set --times")
    elif settings.autoscale and settings.both:
        raise ConfigError("both", "the planner scales prefill and decode workers only")
    return [Scenario(policy, fleet) for policy in policies for fleet in fleets]


def fleet_options(settings: SimulateSettings, scenario: Scenario) -> FleetOptions:
    if settings.counted:
        _check_counted(settings)
    if settings.message_poll and (settings.leap or settings.counted):
        way = "leap" if settings.leap else "counted"
        raise ConfigError("message_poll", f"needs workers that make each step: not with --{way}")
    engine = EngineSettings.model_validate(
        {
            name: getattr(settings, name)
            for name in (
                *("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "chunk_size"),
                *("announce", "enable_prefix_caching", "queue_policy", "slo_late"),
            )
        }
    )
    policy = partial(
        create_policy,
        scenario.policy,
        prefill=settings.prefill_policy,
        decode=settings.decode_policy,
        min_remote_tokens=settings.min_remote_tokens or 0,
        hedges=settings.hedge_prefill,
        seed=settings.seed,
    )
    policy()  # an unknown name is said before anything runs
    return FleetOptions(
        num_workers=scenario.num_workers,
        times={
            WorkerRole.PREFILL: _times(settings, "prefill_times"),
            WorkerRole.DECODE: _times(settings, "decode_times"),
            WorkerRole.BOTH: _times(settings, "times"),
        },
        settings=engine,
        policy=policy,
        link=LinkSpeed(bandwidth=1e9 * settings.bandwidth, latency_s=settings.link_latency / 1000),
        max_model_len=settings.max_model_len,
        message_s=settings.message_latency / 1000,
        host=HostTime(settings.host_time / 1000, settings.host_request_time / 1000, settings.message_poll / 1000),
        leaps=settings.leap,
        is_counted=settings.counted,
        tells_times=settings.router_times,
        lends=settings.lend_blocks,
        scaling=_scaling(settings) if settings.autoscale or settings.move_roles else None,
        targets=_targets(parse_goodput(settings.goodput, "goodput")),
        admission=_admission(settings),
    )


def new_fleet(options: FleetOptions) -> Fleet | CountedFleet:
    return CountedFleet(options) if options.is_counted else Fleet(options)


def _check_counted(settings: SimulateSettings) -> None:
    """Raises `ConfigError` for what workers without engines cannot do."""
    if settings.leap:
        raise ConfigError("counted", "means nothing with --leap, which is for workers with engines")
    if settings.queue_policy in ("slo", "priority"):
        raise ConfigError("queue_policy", "with --counted workers compute by arrival: set fcfs")
    if settings.queue_policy == "auto":
        if _targets(parse_goodput(settings.goodput, "goodput")) is not None:
            reason = "with --counted workers do not look at the targets of --goodput: set fcfs"
            raise ConfigError("queue_policy", reason)
        if settings.limits_file is not None:
            reason = "with --counted workers do not look at targets of --limits-file: set fcfs"
            raise ConfigError("queue_policy", reason)
    if settings.hedge_prefill:
        raise ConfigError("hedge_prefill", "with --counted no second prefill worker is asked")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        reason = f"with --counted a step has room for all requests: {settings.max_num_seqs} at least (--max-num-seqs)"
        raise ConfigError("max_num_batched_tokens", reason)


def _admission(settings: SimulateSettings) -> AdmissionOptions:
    if settings.limits_file is not None:
        read_limits(settings.limits_file)  # what is wrong with it is said before anything runs
    if settings.max_requests_per_key is not None and settings.max_requests is None:
        raise ConfigError("max_requests_per_key", "means nothing without --max-requests")
    return AdmissionOptions(
        max_running=settings.max_running,
        max_queued=settings.max_queued,
        max_queue_wait_s=settings.max_queue_wait,
        max_requests=settings.max_requests,
        max_requests_per_key=settings.max_requests_per_key,
        limits_file=settings.limits_file,
    )


def _targets(goodput: Goodput) -> LatencyTargets | None:
    """What requests ask for: what a good request keeps, but for the time of its whole answer."""
    ttft_ms, tpot_ms = goodput.get("ttft"), goodput.get("tpot")
    return None if ttft_ms is None and tpot_ms is None else LatencyTargets(ttft_ms, tpot_ms)


def _times(settings: SimulateSettings, field: str) -> SimulatedTime:
    name = getattr(settings, field) or settings.times
    try:
        times = simulated_time(name)
    except ConfigError as error:
        raise ConfigError(field if getattr(settings, field) else "times", error.message.partition(": ")[2]) from error
    return times if settings.kv_token_bytes is None else replace(times, kv_token_bytes=settings.kv_token_bytes)


def _scaling(settings: SimulateSettings) -> ScalingOptions:
    planner = PlannerOptions(
        prefill=Bounds(settings.prefill_min, settings.prefill_max),
        decode=Bounds(settings.decode_min, settings.decode_max),
        both=Bounds(settings.both_min, settings.both_max) if settings.move_roles else None,
        tolerance=settings.tolerance,
        scale_up_delay_s=settings.scale_up_delay,
        scale_down_delay_s=settings.scale_down_delay,
        idle_timeout_s=settings.idle_timeout,
    )
    targets = Targets(
        queued_tokens=settings.target_queued_tokens,
        prefill_rate=settings.target_prefill_rate,
        kv_usage=settings.target_kv_usage,
        requests=settings.target_requests,
    )
    goal = latency_goal(
        settings.planner,
        settings.target_ttft_ms,
        settings.target_tpot_ms,
        share=settings.target_share,
        startup_s=settings.startup,
        kv_usage=settings.target_kv_usage,
    )
    roles = RoleOptions(interval_s=settings.role_interval, delay_s=settings.role_delay, gain=settings.role_gain)
    return ScalingOptions(
        planner=planner,
        targets=targets,
        goal=goal,
        roles=roles if settings.move_roles else None,
        adds=settings.autoscale,
        startup_s=settings.startup,
        window_s=settings.arrival_window,
    )
