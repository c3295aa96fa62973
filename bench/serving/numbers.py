"""Statistics of a run, without numpy: a router's image has none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for a two-sided interval of 95 %, by degrees of freedom from 1 on."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in order, by linear interpolation between the two nearest ones: what numpy's `percentile` gives, and so
    `vllm bench serve`. `ordered` must not be empty."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(slots=True, frozen=True)
class Interval:
    """A mean over repeats, and where the true mean is with a probability of 95 % (Student's t)."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Of at least one value. One alone says nothing about its error: the interval is without bounds."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    # Above 30 degrees of freedom the value for 30 is used, which is a little too wide.
    t = _T_95[min(len(values) - 1, len(_T_95)) - 1]
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
