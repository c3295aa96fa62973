"""When the requests of an open loop are due: seconds after the start, fixed before the run, so that a slow system does
not slow its own load down. Every function gives the same times for the same seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence


def poisson(rate: float, seed: int | str | random.Random) -> Iterator[float]:
    """Independent requests, `rate` a second on average, for ever."""
    return gamma(rate, 1.0, seed)


def gamma(rate: float, burstiness: float, seed: int | str | random.Random) -> Iterator[float]:
    """Gaps between requests are Gamma-distributed with the shape `burstiness`: 1 is a Poisson process, less comes in
    clusters, more is steadier. The gaps' coefficient of variation is `1 / sqrt(burstiness)`."""
    _check_positive(rate=rate, burstiness=burstiness)
    draw = _random(seed)
    at = 0.0
    while True:
        if burstiness == 1.0:
            at += draw.expovariate(rate)
        else:
            at += draw.gammavariate(burstiness, 1 / (rate * burstiness))
        yield at


def bursts(rate: float, size: int, seed: int | str | random.Random) -> Iterator[float]:
    """`size` requests at the same moment; the moments are a Poisson process, `rate` requests a second in all."""
    _check_positive(rate=rate, size=size)
    for at in poisson(rate / size, seed):
        yield from itertools.repeat(at, size)


def steady(rate: float) -> Iterator[float]:
    """One request every `1 / rate` seconds, the first one at once."""
    _check_positive(rate=rate)
    return (number / rate for number in itertools.count())


def varying(rate_at: Callable[[float], float], most: float, seed: int | str | random.Random) -> Iterator[float]:
    """Independent requests, `rate_at(seconds)` a second at each moment: a Poisson process of the rate `most`, which
    `rate_at` never exceeds, thinned (Lewis and Shedler, 1979)."""
    draw = _random(seed)
    for at in poisson(most, draw):
        if draw.random() * most < rate_at(at):
            yield at


def ramp(first: float, last: float, seconds: float, seed: int | str | random.Random) -> Iterator[float]:
    """From `first` requests a second to `last`, evenly over `seconds`; `last` from then on."""
    _check_positive(ramp=max(first, last), seconds=seconds)
    if min(first, last) < 0:
        raise ValueError(f"ramp: must not be below 0, not {min(first, last)}")
    return varying(lambda at: first + (last - first) * min(at / seconds, 1.0), max(first, last), seed)


def day(peak: float, seconds: float, seed: int | str | random.Random) -> Iterator[float]:
    """A day's curve pressed into `seconds`, again and again: a night with a tenth of the `peak` rate, which comes once
    in the morning and once in the afternoon, and a lunch between them."""
    _check_positive(peak=peak, seconds=seconds)

    def rate_at(at: float) -> float:
        phase = math.pi * (at / seconds % 1.0)
        return peak * (0.1 + 0.9 * (0.6 * math.sin(phase) ** 2 + 0.4 * math.sin(2 * phase) ** 2) / _DAY_PEAK)

    return varying(rate_at, peak, seed)


def from_trace(timestamps: Sequence[float], *, speed: float = 1.0) -> list[float]:
    """A trace's own times (seconds, from any moment on), from its first request on; `speed` 2 plays it in half the
    time."""
    _check_positive(speed=speed)
    ordered = sorted(timestamps)
    return [(timestamp - ordered[0]) / speed for timestamp in ordered]


def until(times: Iterable[float], seconds: float) -> list[float]:
    """Those before `seconds`."""
    return list(itertools.takewhile(lambda at: at < seconds, times))


def first(times: Iterable[float], num: int) -> list[float]:
    return list(itertools.islice(times, num))


# The most that the curve of `day` reaches: with x = sin^2, 0.6 x + 0.4 * 4 x (1 - x) is largest at x = 2.2 / 3.2.
_DAY_PEAK = 2.2**2 / 6.4


def _random(seed: int | str | random.Random) -> random.Random:
    return seed if isinstance(seed, random.Random) else random.Random(seed)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}: must be above 0, not {value}")
