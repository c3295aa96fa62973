"""Percentiles of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from common import percentiles


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` (0 to 1) of all values do not exceed (nearest rank): one of the values itself.
    Raises `ValueError` if there are none."""
    return percentiles.percentile(sorted(values), share)


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile under `name`; nothing if there are no values."""
    return {f"{name} p{round(100 * share)}": percentile(values, share) for share in (0.5, 0.9, 0.99)} if values else {}
