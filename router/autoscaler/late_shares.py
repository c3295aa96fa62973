"""What share of requests misses its target with a given number of workers: the queues of both roles, by formula.

Prefill is one queue of prompt tokens that all its workers serve: with many prompts a Brownian motion that is reflected
at zero. Decode is a number of requests that run at once, and are the slower the more there are on a worker. How much
will arrive is not certain, so each share is a mean over a normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.autoscaler.forecast import Expected

_NORMAL = ((-2.8570, 0.011257), (-1.3556, 0.222076), (0.0, 0.533333), (1.3556, 0.222076), (2.8570, 0.011257))
"""Points in standard deviations, and their weights: Gauss and Hermite's quadrature of five points."""
_QUANTILES = (-1.2816, -0.5244, 0.0, 0.5244, 1.2816)  # of the normal distribution: the middles of five equal shares
_PARTS = (0.5, 1.0)  # of the time that a number of workers stays: who is late half way, and at its end
_MOST_SPREAD = 3.0  # squared coefficient of variation: a few gigantic prompts are not what most prompts look like


@dataclass(slots=True, frozen=True)
class PrefillQueue:
    """Prompts on their way through the prefill workers."""

    tokens: Expected  # prompt tokens
    squared_variation: float  # of the prompts' lengths
    mean_tokens: float  # of a prompt
    rate: float  # prompt tokens/s of one worker
    ttft_s: float

    def late(self, num_workers: int, *, queued_tokens: float, seconds: float) -> float:
        """The share of prompts whose first token comes later than `ttft_s`, of those that arrive in the `seconds` after
        `queued_tokens` waited.

        Prompts that take longer alone are left out, since no number of workers helps them.
        """
        served = num_workers * self.rate
        waits = self._longest_waits()

        def with_rate(arriving: float) -> float:
            arriving = max(arriving, 0.0)
            drift, variance = arriving - served, arriving * self.tokens.dispersion
            shares = [
                backlog_above(served * wait, drift, variance, queued_tokens, seconds * part)
                for wait in waits
                for part in _PARTS
            ]
            return sum(shares) / len(shares)

        return _over(self.tokens, with_rate)

    def _longest_waits(self) -> Sequence[float]:
        """Seconds that prompts of five lengths may queue: lengths are taken for lognormal."""
        sigma = math.sqrt(math.log(1 + min(self.squared_variation, _MOST_SPREAD)))
        lengths = (self.mean_tokens * math.exp(sigma * z - sigma * sigma / 2) for z in _QUANTILES)
        waits = [wait for length in lengths if (wait := self.ttft_s - length / self.rate) > 0]
        return waits or [self.ttft_s]


@dataclass(slots=True, frozen=True)
class DecodeBatch:
    """Answers on the decode workers."""

    requests: Expected
    mean_tokens: float  # of an answer
    step_s: float  # of a worker's step without requests, and what each request adds
    step_per_request_s: float
    most: float  # requests of one worker with which a token takes as long as it may

    def late(self, num_workers: int) -> float:
        """The share of time in which there are more requests than `num_workers` can run in time, in the long run."""

        def with_rate(arriving: float) -> float:
            tokens_per_s = max(arriving, 0.0) * self.mean_tokens / num_workers
            left = 1 - tokens_per_s * self.step_per_request_s
            if left <= 0 or (running := tokens_per_s * self.step_s / left) >= self.most:
                return 1.0
            # More requests make each one slower, so that there are more yet: 1 / left times.
            variance = max(running * num_workers, 0.1) * self.requests.dispersion / left
            return normal_above((self.most - running) * num_workers / math.sqrt(variance))

        return _over(self.requests, with_rate)


def backlog_above(limit: float, drift: float, variance: float, start: float, seconds: float) -> float:
    """P(a backlog is above `limit`) `seconds` after it was `start`.

    `drift`: what arrives less what is served in a second; `variance`: of what arrives in a second. The distribution of
    Brownian motion reflected at zero: Harrison, Brownian Motion and Stochastic Flow Systems, 1985, section 3.6.
    """
    spread = math.sqrt(variance * seconds)
    if spread <= 0:
        return float(max(start + drift * seconds, 0.0) > limit)
    above = normal_above((limit - start - drift * seconds) / spread)
    reflected = normal_above((limit + start + drift * seconds) / spread)
    if reflected > 0:
        above += math.exp(min(2 * drift * limit / variance + math.log(reflected), 0.0))
    return min(above, 1.0)


def normal_above(x: float) -> float:
    """P(Z > x) of a standard normal variable."""
    return 0.5 * math.erfc(x / math.sqrt(2))


def _over(expected: Expected, share: Callable[[float], float]) -> float:
    """Mean of `share` over what the rate may be."""
    return sum(weight * share(expected.rate + x * expected.error) for x, weight in _NORMAL)
