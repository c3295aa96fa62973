"""How long prompts and answers are, in tokens. Every function gives the same lengths for the same seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator


def fixed(num_tokens: int) -> Iterator[int]:
    _check(num_tokens, num_tokens)
    return itertools.repeat(num_tokens)


def uniform(low: int, high: int, seed: int | str) -> Iterator[int]:
    """Any length from `low` to `high`, both included, as often as any other."""
    _check(low, high)
    draw = random.Random(seed)
    while True:
        yield draw.randint(low, high)


def lognormal(median: float, sigma: float, low: int, high: int, seed: int | str) -> Iterator[int]:
    """Many short and few long ones, as people's prompts are: `sigma` is the standard deviation of the logarithm.
    Lengths beyond `low` and `high` become these."""
    _check(low, high)
    if not (median > 0 and sigma >= 0):
        raise ValueError(f"median: must be above 0, and sigma not below 0, not {median} and {sigma}")
    draw = random.Random(seed)
    while True:
        yield min(max(round(draw.lognormvariate(math.log(median), sigma)), low), high)


def _check(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ValueError(f"tokens: must be from 1 on and not fall, not {low} to {high}")
