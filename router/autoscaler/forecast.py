"""What will arrive: how many requests a second, how long their prompts, and what past days had at this hour.

Each is a level with a slope, followed by Kalman filters (the local linear trend of Harvey, Forecasting, Structural Time
Series Models and the Kalman Filter, 1989). Their level jumps if the mean of the last few bins differs from what was
foretold before them by more than noise. How noisy a bin is comes from the traffic itself: a large fleet's traffic is
followed within a minute, and that of a few long prompts is averaged over several.

Pure: time comes in as an argument, in seconds, never decreasing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

BIN_S = 5.0
MEMORY_S = 600.0  # over which dispersions are averaged
DAY_S = 86_400.0
NUM_DAY_PARTS = 96  # a quarter of an hour each

_WANDERS = (2e-5, 1e-4, 5e-4)
"""How much a slope changes in a second (standard deviation), as a share of the level: traffic that takes hours to
change, minutes, or less. The filter that foretold the last bins best counts most."""
_FORGET_S = 120.0  # after so long a filter's score counts half
_FEW = 5  # requests in a bin
_ENOUGH = 30  # requests, whose mean rate tells the noise of a bin
_SURPRISE = 3.0  # standard deviations; two bins in a row beyond it are a jump
_JUMP = 3.5  # likewise, of the mean of a window
_WINDOWS = (2, 4, 8, 16)  # bins
_LEAST_SPREAD = 0.05  # squared coefficient of variation of lengths


@dataclass(slots=True, frozen=True)
class Expected:
    """Something a second, at one moment to come."""

    rate: float
    error: float  # standard deviation of the rate; the noise of single arrivals is left out
    dispersion: float  # of those: variance over mean of what arrives in any time. 1 if single ones come independently


class RequestForecast:
    """Of requests, from a total that grows."""

    def __init__(self, day_s: float = DAY_S) -> None:
        self._level: _Filters | None = None
        self._day = _DailyPattern(day_s)
        self._bin: tuple[float, float] | None = None  # when it began, and the total by then
        self._now = 0.0
        self._dispersion = _Mean(MEMORY_S)
        self._bins: deque[tuple[float, float]] = deque(maxlen=round(MEMORY_S / BIN_S))  # seconds and requests of each

    def add(self, now: float, total: float) -> None:
        """A total that is smaller than before is another counter: the bin begins anew."""
        self._now = now
        if self._bin is None or total < self._bin[1]:
            self._bin = now, total
            return
        elapsed = now - self._bin[0]
        if elapsed < BIN_S:
            return
        rate = (total - self._bin[1]) / elapsed
        self._bin = now, total
        self._day.add(now, rate)
        self._bins.append((elapsed, rate * elapsed))
        if self._level is None:
            self._level = _Filters(rate, self._noise(max(rate, 1 / elapsed), elapsed))
            return
        expected, error = self._level.ahead(elapsed)
        usual = max(expected, self._mean_rate())
        # A bin of many requests tells its own noise, too, so that a burst counts for less; one of few would tell that
        # it has none, and count for more than all others.
        noisy = max(usual, rate) if usual * elapsed >= _FEW else usual
        self._level.step(rate, self._noise(noisy, elapsed), elapsed, self._noise(usual, elapsed))
        if expected > 0:
            self._dispersion.add(((rate - expected) ** 2 - error**2) * elapsed / expected, elapsed)

    def ahead(self, seconds: float) -> Expected | None:
        """None until a bin has passed."""
        if self._level is None:
            return None
        rate, error = self._level.ahead(seconds)
        ratio = self._day.ratio(self._now, seconds)
        if ratio is not None:
            rate = max(rate, self._level.ahead(0.0)[0] * ratio)
        return Expected(max(rate, 0.0), error, self._spread)

    @property
    def _spread(self) -> float:
        return max(1.0, self._dispersion.value or 0.0)

    def _mean_rate(self) -> float:
        """Of the last bins with enough requests to know it. A bin's noise is that of a mean: by the rate of the bin
        itself, one without a request would have next to none, and count for more than all others."""
        seconds = requests = 0.0
        for elapsed, num in reversed(self._bins):
            seconds, requests = seconds + elapsed, requests + num
            if requests >= _ENOUGH:
                break
        return requests / seconds

    def _noise(self, rate: float, elapsed: float) -> float:
        """Variance of a bin's rate. Of one without any request it is not zero."""
        return self._spread * max(rate, 1 / MEMORY_S) / elapsed


class LengthForecast:
    """Of the mean length of what arrives, from the totals of requests and tokens."""

    def __init__(self) -> None:
        self._level: _Filters | None = None
        self._bin: tuple[float, float, float] | None = None  # when it began, requests, tokens
        self._squared_variation = _Mean(MEMORY_S)

    def add(self, now: float, requests: float, tokens: float) -> None:
        if self._bin is None or requests < self._bin[1] or tokens < self._bin[2]:
            self._bin = now, requests, tokens
            return
        elapsed, num = now - self._bin[0], requests - self._bin[1]
        if elapsed < BIN_S or num <= 0:
            return
        length = (tokens - self._bin[2]) / num
        self._bin = now, requests, tokens
        if self._level is None:
            self._level = _Filters(length, length * length / num)
            return
        expected, error = self._level.ahead(elapsed)
        expected = max(expected, 1.0)
        # Counted by requests: a bin of one says little of the spread.
        self._squared_variation.add(((length - expected) ** 2 - error**2) * num / expected**2, num)
        self._level.step(length, self.squared_variation * expected**2 / num, elapsed)

    def ahead(self, seconds: float) -> tuple[float, float] | None:
        """Mean length in tokens and its standard error; None until a bin with requests has passed."""
        if self._level is None:
            return None
        length, error = self._level.ahead(seconds)
        return max(length, 1.0), error

    @property
    def squared_variation(self) -> float:
        """Variance of single lengths over the square of their mean."""
        value = self._squared_variation.value
        return 1.0 if value is None else max(value, _LEAST_SPREAD)


def expected_tokens(requests: Expected, lengths: LengthForecast, seconds: float) -> Expected | None:
    """Tokens a second: so many requests of such lengths. Numbers and lengths are taken for independent."""
    found = lengths.ahead(seconds)
    if found is None:
        return None
    length, error = found
    return Expected(
        requests.rate * length,
        math.hypot(requests.error * length, requests.rate * error),
        length * (lengths.squared_variation + requests.dispersion),
    )


class _Filters:
    """Local linear trends that differ in how fast the slope may change, mixed by how well each one did lately."""

    def __init__(self, level: float, variance: float) -> None:
        self._trends = [_Trend(level, variance, wander) for wander in _WANDERS]
        self._scores = [0.0] * len(_WANDERS)
        self._bins: deque[_Bin] = deque(maxlen=_WINDOWS[-1])

    def step(self, seen: float, noise: float, elapsed: float, usual_noise: float | None = None) -> None:
        """`noise`: variance of `seen` about the level, and `usual_noise` what it would be if nothing has changed; None:
        the same."""
        usual_noise = noise if usual_noise is None else usual_noise
        self._bins.append(_Bin(seen, usual_noise, elapsed, [self.ahead(elapsed * (num + 1) / 2) for num in _WINDOWS]))
        if jump := self._jump():
            for trend in self._trends:
                trend.jump(*jump)
            self._bins.clear()
            return
        keep = 0.5 ** (elapsed / _FORGET_S)
        self._scores = [
            score * keep + trend.step(seen, noise, elapsed)
            for score, trend in zip(self._scores, self._trends, strict=True)
        ]

    def _jump(self) -> tuple[float, float] | None:
        """The mean of the shortest window that differs from what was foretold for it by more than noise, and the
        variance of that mean. A jump that is small beside the noise of single bins is seen by their sum alone."""
        bins = list(self._bins)
        for place, num in enumerate(_WINDOWS):
            if num > len(bins):
                return None
            window = bins[-num:]
            seconds = sum(one.elapsed for one in window)
            seen = sum(one.seen * one.elapsed for one in window) / seconds
            noise = sum(one.noise * one.elapsed**2 for one in window) / seconds**2
            foretold, error = window[0].foretold[place]
            if seen > foretold > 0:  # roots of numbers are equally noisy, however large these are
                noise *= (math.sqrt(seen) + math.sqrt(foretold)) ** 2 / (4 * foretold)
            if abs(seen - foretold) > _JUMP * math.sqrt(noise + error**2):
                return seen, noise
        return None

    def ahead(self, seconds: float) -> tuple[float, float]:
        """Mean and standard deviation of the level `seconds` from the last step."""
        weights, each = self._weights(), [trend.ahead(seconds) for trend in self._trends]
        mean = sum(weight * one for weight, (one, _) in zip(weights, each, strict=True))
        variance = sum(
            weight * (error**2 + (one - mean) ** 2) for weight, (one, error) in zip(weights, each, strict=True)
        )
        return mean, math.sqrt(variance)

    def _weights(self) -> Sequence[float]:
        best = max(self._scores)
        weights = [math.exp(score - best) for score in self._scores]
        total = sum(weights)
        return [weight / total for weight in weights]


@dataclass(slots=True, frozen=True)
class _Bin:
    seen: float
    noise: float
    elapsed: float
    foretold: Sequence[tuple[float, float]]  # before it was seen: means of the windows that begin with it, and errors


class _Trend:
    """A level and its slope, and the covariance of both."""

    def __init__(self, level: float, variance: float, wander: float) -> None:
        self._wander = wander
        self._level, self._slope = level, 0.0
        self._level_var, self._slope_var, self._covar = variance, (level * 1e-3) ** 2, 0.0
        self._num_surprises = 0

    def step(self, seen: float, noise: float, elapsed: float) -> float:
        """Returns the logarithm of how likely `seen` was: Student's t with four degrees of freedom, since a single long
        prompt must not decide which filter is right."""
        self._advance(elapsed)
        error, total = seen - self._level, self._level_var + noise
        score = -0.5 * math.log(total) - 2.5 * math.log(1 + error * error / total / 4)
        self._num_surprises = self._num_surprises + 1 if abs(error) > _SURPRISE * math.sqrt(total) else 0
        if self._num_surprises > 1:  # the level is another one
            self._level_var += error * error
            total += error * error
        level_gain, slope_gain = self._level_var / total, self._covar / total
        self._level = max(self._level + level_gain * error, 0.0)
        self._slope += slope_gain * error
        self._slope_var -= slope_gain * self._covar
        self._covar *= 1 - level_gain
        self._level_var *= 1 - level_gain
        return score

    def jump(self, level: float, variance: float) -> None:
        """The level is another one; the slope stays as it was."""
        self._level, self._level_var, self._covar = level, variance, 0.0

    def _advance(self, elapsed: float) -> None:
        change = (self._wander * self._level) ** 2
        self._level_var = self._variance(elapsed)
        self._covar += elapsed * self._slope_var + change * elapsed**2 / 2
        self._slope_var += change * elapsed
        self._level = max(self._level + self._slope * elapsed, 0.0)

    def ahead(self, seconds: float) -> tuple[float, float]:
        return self._level + self._slope * seconds, math.sqrt(max(self._variance(seconds), 0.0))

    def _variance(self, seconds: float) -> float:
        change = (self._wander * self._level) ** 2
        return self._level_var + 2 * seconds * self._covar + seconds**2 * self._slope_var + change * seconds**3 / 3


class _DailyPattern:
    """Mean rate of each part of a day over past days; each day counts as much as all before it."""

    def __init__(self, day_s: float) -> None:
        self._part_s = day_s / NUM_DAY_PARTS
        self._rates: list[float | None] = [None] * NUM_DAY_PARTS
        self._part: int | None = None
        self._sum, self._num = 0.0, 0

    def add(self, now: float, rate: float) -> None:
        part = int(now / self._part_s) % NUM_DAY_PARTS
        if self._part is not None and part != self._part:
            mean, before = self._sum / self._num, self._rates[self._part]
            self._rates[self._part] = mean if before is None else (mean + before) / 2
            self._sum, self._num = 0.0, 0
        self._part = part
        self._sum += rate
        self._num += 1

    def ratio(self, now: float, seconds: float) -> float | None:
        """How many times as much as now arrives `seconds` later. None for an hour that no past day had."""
        here, there = self._at(now), self._at(now + seconds)
        return there / here if here and there is not None else None

    def _at(self, when: float) -> float | None:
        """Between the middles of two parts."""
        place = when / self._part_s - 0.5
        left = math.floor(place)
        low, high = self._rates[left % NUM_DAY_PARTS], self._rates[(left + 1) % NUM_DAY_PARTS]
        return None if low is None or high is None else low + (high - low) * (place - left)


class _Mean:
    """Weighted; exponentially forgotten once `memory` of weight was seen, plain until then."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._seen = 0.0
        self.value: float | None = None

    def add(self, value: float, weight: float) -> None:
        self._seen = min(self._seen + weight, self._memory)
        share = weight / self._seen
        self.value = value if self.value is None else self.value + share * (value - self.value)
