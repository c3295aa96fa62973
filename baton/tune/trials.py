"""Plays a traffic to fleets with different settings: one simulation for each, never the same twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.tune.knobs import ROLES, Config, Space, make_space
from baton.tune.search import OutOfTimeError, Score
from common.config import SimulateSettings, TuneSettings
from common.errors import ConfigError
from common.goodput import Goodput, parse_goodput
from common.traffic.requests import TrafficRequest
from common.traffic.traces import scaled
from simulation.fleet import Fleet
from simulation.outcome import Outcome, RequestOutcome
from simulation.scenario import Scenario, fleet_options, traffic

SHORTEST = 5  # times the target for the first token: in less, queues do not grow
WORST = 10.0  # of a target: later than that is as bad


@dataclass(slots=True, frozen=True)
class Trial:
    """One simulation."""

    config: Config
    is_check: bool  # of the requests that check what was found
    load: float
    num_requests: int
    score: Score
    figures: dict[str, float]  # `Outcome.summary`
    failures: dict[str, int]


class Trials:
    def __init__(self, settings: TuneSettings, is_late: Callable[[], bool] = lambda: False) -> None:
        """`is_late`: the time for simulations is over. Raises `ConfigError` for what is wrong in settings or files."""
        self.settings = settings
        self.goodput = goodput_of(settings)
        self.done: list[Trial] = []
        self.sources: tuple[str, ...] = ()  # where the times of steps are from, in words
        self._is_late = is_late
        self._found: dict[tuple[Config, bool, float, int], Trial] = {}
        self._requests = {False: traffic(settings), True: _others(settings)}
        if any(requests[-1].at == requests[0].at for requests in self._requests.values()):
            raise ConfigError("requests", "come all at one moment: settings are compared by rates of requests")
        longest = max(one.num_prompt_tokens for one in self.requests())
        self.space = make_space(
            settings,
            longest_prompt=longest,
            has_sessions=any(one.session for one in self.requests()),
            has_targets=bool(self.goodput.keys() & {"ttft", "tpot"}),
        )

    def requests(self, *, is_check: bool = False, load: float = 1.0) -> list[TrafficRequest]:
        """In the order of time."""
        requests = self._requests[is_check]
        return requests if load == 1.0 else [*scaled(requests, speed=load)]

    def rate(self, *, is_check: bool = False, load: float = 1.0) -> float:
        """Requests a second that come, on average."""
        requests = self._requests[is_check]
        return load * (len(requests) - 1) / (requests[-1].at - requests[0].at)

    @property
    def max_load(self) -> float:
        """Beyond it the traffic is too short to tell anything."""
        target_ms = self.goodput.get("ttft") or self.goodput.get("e2el") or 1000.0
        shortest = min(requests[-1].at for requests in self._requests.values())
        return shortest / (SHORTEST * target_ms / 1000)

    def play(self, config: Config, *, load: float, is_check: bool = False, num_requests: int | None = None) -> Trial:
        """Raises `OutOfTimeError`, and `ConfigError`."""
        requests = self.requests(is_check=is_check, load=load)[:num_requests]
        key = config, is_check, load, len(requests)
        if (known := self._found.get(key)) is not None:
            return known
        self._check_time()
        outcome = self.outcome(config, requests, self._check_time)
        trial = Trial(
            config,
            is_check,
            load,
            len(requests),
            score_of(outcome.requests, self.goodput),
            outcome.summary(self.goodput),
            outcome.failures(),
        )
        self._found[key] = trial
        self.done.append(trial)
        return trial

    def outcome(
        self, config: Config, requests: Sequence[TrafficRequest], check: Callable[[], None] = lambda: None
    ) -> Outcome:
        """`check` is called now and then. Raises `ConfigError`."""
        made, scenario = scenario_of(self.settings, self.space, config, self.goodput)
        options = fleet_options(made, scenario)
        used = [options.times[role].source for role, num in scenario.num_workers.items() if num]
        self.sources = tuple(dict.fromkeys([*self.sources, *used]))
        return Fleet(options).run(requests, lambda _: check())

    def _check_time(self) -> None:
        if self._is_late():
            raise OutOfTimeError


def scenario_of(
    settings: TuneSettings, space: Space, config: Config, goodput: Goodput
) -> tuple[SimulateSettings, Scenario]:
    """What simulates `config`."""
    named = space.named(config)
    del named[ROLES]
    shared = SimulateSettings.model_fields.keys() & TuneSettings.model_fields.keys() - {"prefill", "decode", "both"}
    values = {name: getattr(settings, name) for name in shared}
    targets = tuple(f"{name}:{ms!r}" for name, ms in goodput.items())
    made = SimulateSettings.model_validate({**values, **named, "goodput": targets})
    return made, Scenario(str(named["policy"]), space.roles(config).num_workers)


def goodput_of(settings: TuneSettings) -> dict[str, float]:
    """`--goodput` and `--slo-*-ms` together. Raises `ConfigError`."""
    targets = parse_goodput(settings.goodput, "goodput")
    for name, value in (("ttft", settings.slo_ttft_ms), ("tpot", settings.slo_tpot_ms)):
        if value is None:
            continue
        if name in targets:
            raise ConfigError(f"slo_{name}_ms", f"goodput has {name}, too")
        targets[name] = value
    if not targets:
        raise ConfigError("goodput", "is missing: what a good answer keeps, as ttft:500 tpot:50")
    return targets


def score_of(requests: Sequence[RequestOutcome], goodput: Goodput) -> Score:
    num_good = sum(one.is_good(goodput) for one in requests)
    return Score(num_good / len(requests), math.fsum(_closeness(one, goodput) for one in requests) / len(requests))


def _closeness(one: RequestOutcome, goodput: Goodput) -> float:
    """The largest share of a target that the answer took."""
    if one.failure or one.ttft_s is None:
        return WORST
    found = {"ttft": one.ttft_s, "tpot": one.tpot_s or 0.0, "e2el": one.e2e_s}
    return min(max(1000 * found[name] / ms for name, ms in goodput.items()), WORST)


def _others(settings: TuneSettings) -> list[TrafficRequest]:
    """Others of the same kind, which begin at 0 too: those that follow in a trace, which is played again if it has too
    few; made ones of the next seed."""
    num = settings.requests
    if settings.trace is None:
        return traffic(settings.model_copy(update={"seed": settings.seed + 1}))
    later = traffic(settings.model_copy(update={"requests": 2 * num}))[num:]
    return [replace(one, at=one.at - later[0].at) for one in later]
