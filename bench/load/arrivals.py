"""When the requests of an open loop are due: seconds after the start, fixed before the run, so that a slow system does
not slow its own load down. Every function gives the same times for the same seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence


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


def _random(seed: int | str | random.Random) -> random.Random:
    return seed if isinstance(seed, random.Random) else random.Random(seed)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}: must be above 0, not {value}")
