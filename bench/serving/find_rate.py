"""The highest rate of requests at which an endpoint still holds its targets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.serving.figures import Figures, number
from common.errors import InternalError

MOST_DOUBLINGS = 20


@dataclass(slots=True, frozen=True)
class Probe:
    rate: float  # requests per second
    holds: bool
    figures: Figures


@dataclass(slots=True, frozen=True)
class Found:
    rate: float  # the highest that held; 0 if none did
    probes: tuple[Probe, ...]  # in the order of measuring
    reason: str = ""  # why the search ended before it was as exact as it should be

    @property
    def best(self) -> Figures | None:
        """Figures at that rate."""
        return next((probe.figures for probe in self.probes if probe.holds and probe.rate == self.rate), None)


async def find_rate(
    measure: Callable[[float], Awaitable[Figures]], *, start: float, good_fraction: float, tolerance: float
) -> Found:
    """Doubles the rate from `start` (or halves it, if `start` is too much) until one rate holds and the other does not,
    then halves the distance between them until it is at most `tolerance` (a share) of the rate that holds.

    A rate holds if at least `good_fraction` of the requests meet their targets; refused and failed ones do not. A
    measurement that is not valid ends the search: the client cannot send more."""
    probes: list[Probe] = []
    low = high = 0.0  # that hold, and that do not; 0: not known yet
    rate = start
    while len(probes) < MOST_DOUBLINGS or (low and high):
        made = await measure(rate)
        if not made["valid"]:
            reasons = made["invalid_reasons"]
            assert isinstance(reasons, list)
            probes.append(Probe(rate, False, made))
            return Found(low, tuple(probes), f"at {rate:g} requests/s the client was too slow: {reasons[0]}")
        holds = number(made, "good_request_fraction") >= good_fraction
        probes.append(Probe(rate, holds, made))
        low, high = (rate, high) if holds else (low, rate)
        if low and high and high - low <= tolerance * low:
            return Found(low, tuple(probes))
        rate = (low + high) / 2 if low and high else 2 * low or high / 2
    if low == 0:
        raise InternalError(f"no rate down to {high:g} requests/s holds the targets")
    return Found(low, tuple(probes), f"targets hold at every rate up to {low:g} requests/s")
