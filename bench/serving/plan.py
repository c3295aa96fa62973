"""Makes the load of a run from what the command was told. The same seed gives the same load."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.serving.datasets import make_users
from bench.serving.load import Conversation, Load, LoadSettings, Turn
from bench.serving.texts import Texts
from common.errors import ConfigError
from common.traffic import arrivals

DEFAULT_NUM_PROMPTS = 100
MOST_OF_A_TRACE = 10**9
NUM_MADE_AHEAD = 1000  # requests without a rate that a time ends, if --num-prompts does not say


def make_load(settings: LoadSettings, texts: Texts, seed: str) -> Load:
    """Raises `ConfigError`."""
    users = make_users(settings, texts, seed)
    num = _num_conversations(settings)
    end_s = math.inf if settings.duration is None else settings.duration
    if settings.has_own_times:  # texts of what comes later are not made
        users = itertools.takewhile(lambda user: user.at < end_s, users)
    found = list(itertools.islice(users, num))
    if settings.has_own_times:
        starts = [user.at for user in found]
    else:
        turns_each = sum(len(user.turns) for user in found) / len(found)
        starts = list(itertools.islice(_starts(settings, seed, len(found), turns_each), len(found)))
        if settings.duration is None and settings.ramp_up_strategy is None:
            starts = _at_the_rate(starts, settings.request_rate / turns_each)
    draw = random.Random(f"{seed}/cancelled")
    conversations = [
        Conversation(start_s=start_s, turns=_with_cancels(settings, user.turns, draw))
        for start_s, user in zip(starts, found, strict=True)
        if start_s < end_s
    ]
    further = None
    if not settings.is_open and settings.duration is not None and settings.num_prompts is None:
        further = (Conversation(turns=_with_cancels(settings, user.turns, draw)) for user in users)
    if not conversations:
        raise ConfigError("--duration", f"no request is due in {settings.duration:g} seconds")
    return Load(
        conversations=conversations,
        further=further,
        is_open=settings.is_open,
        max_concurrency=settings.max_concurrency,
        stop_s=settings.duration,
    )


def _num_conversations(settings: LoadSettings) -> int:
    """At most: a file may have fewer."""
    num = settings.num_prompts
    if num is None:
        num = DEFAULT_NUM_PROMPTS
        if settings.duration is not None:
            num = MOST_OF_A_TRACE if settings.has_own_times else NUM_MADE_AHEAD
            rate = settings.request_rate if settings.ramp_up_strategy is None else _mean_rate(settings)
            if rate != math.inf:  # twice as many as will be due; the others are dropped
                num = math.ceil(2 * rate * settings.duration) + 100
    return math.ceil(num / settings.turns)


def _starts(settings: LoadSettings, seed: str, num: int, turns_each: float) -> Iterator[float]:
    """When conversations begin: requests come at the rate that is asked for if all turns are sent."""
    draw = f"{seed}/arrivals"
    if settings.ramp_up_strategy is not None:
        return _ramp(settings, random.Random(draw), num, turns_each)
    if settings.request_rate == math.inf:  # all at once, or a closed loop
        return itertools.repeat(0.0)
    rate = settings.request_rate / turns_each
    if settings.burst_size > 1:
        return arrivals.bursts(rate, settings.burst_size, draw)
    if settings.burstiness == math.inf:
        return arrivals.steady(rate)
    return arrivals.gamma(rate, settings.burstiness, draw)


def _at_the_rate(starts: list[float], rate: float) -> list[float]:
    """Stretched so that all of them come at exactly `rate`, as in `vllm bench serve`: few random gaps may be far from
    their mean."""
    if math.isinf(rate) or not starts or not starts[-1]:
        return starts
    factor = len(starts) / rate / starts[-1]
    return [start_s * factor for start_s in starts]


def _ramp(settings: LoadSettings, draw: random.Random, num: int, turns_each: float) -> Iterator[float]:
    """The rate goes from start to end with time if a duration is given, else with the number of the request, as in
    `vllm bench serve`."""
    low, high = _ramp_rates(settings)
    is_linear = settings.ramp_up_strategy == "linear"
    shape = settings.burstiness
    at = num_due = 0.0
    for number in range(num):
        gap = turns_each * (draw.gammavariate(shape, 1 / shape) if shape != math.inf else 1.0)  # at a rate of 1
        if settings.duration is not None:
            num_due += gap
            yield settings.duration * _share_of_ramp(num_due / settings.duration, low, high, is_linear=is_linear)
            continue
        share = number / max(num - 1, 1)
        at += gap / (low + (high - low) * share if is_linear else low * (high / low) ** share)
        yield at


def _share_of_ramp(num_due: float, low: float, high: float, *, is_linear: bool) -> float:
    """How far a ramp of one second is when `num_due` requests were due: the inverse of the integral of its rate.
    Infinite if it never has so many, as one that goes down may."""
    if is_linear:
        root = low**2 + 2 * (high - low) * num_due
        return 2 * num_due / (low + math.sqrt(root)) if root >= 0 else math.inf
    growth = math.log(high / low)
    if not growth:
        return num_due / low
    grown = 1 + growth * num_due / low
    return math.log(grown) / growth if grown > 0 else math.inf


def _mean_rate(settings: LoadSettings) -> float:
    """Of a ramp over time."""
    low, high = _ramp_rates(settings)
    if settings.ramp_up_strategy == "linear" or low == high:
        return (low + high) / 2
    return (high - low) / math.log(high / low)


def _ramp_rates(settings: LoadSettings) -> tuple[float, float]:
    assert settings.ramp_up_start_rps is not None
    assert settings.ramp_up_end_rps is not None
    return settings.ramp_up_start_rps, settings.ramp_up_end_rps


def _with_cancels(settings: LoadSettings, turns: Sequence[Turn], draw: random.Random) -> Sequence[Turn]:
    if not settings.cancel_fraction:
        return turns
    return [
        replace(turn, cancel_after_s=settings.cancel_after) if draw.random() < settings.cancel_fraction else turn
        for turn in turns
    ]
