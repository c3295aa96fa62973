"""Percentiles by nearest rank: each is one of the values."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` (0 to 1) of all values do not exceed. `ordered`: the values, the smallest first.
    Raises `ValueError` if there are none."""
    if not ordered:
        raise ValueError("values: a percentile of nothing")
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def middle_and_late(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Median and 95th percentile of values in any order; None if there are none."""
    if not values:
        return None, None
    ordered = sorted(values)
    return percentile(ordered, 0.5), percentile(ordered, 0.95)
