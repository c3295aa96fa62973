"""Latency targets of a request: checked in one place for gRPC, REST, clients and workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import InvalidArgumentError

MAX_TARGET_MS = 24 * 3600 * 1000.0


@dataclass(slots=True, frozen=True)
class LatencyTargets:
    """In milliseconds. None: no such target; at least one of them is set."""

    ttft_ms: float | None = None  # from the request's arrival at its router to its first token there
    tpot_ms: float | None = None  # mean time from one token of the answer to the next one


def check_targets(targets: LatencyTargets, name: str = "slo") -> None:
    """Raises `InvalidArgumentError`. `name` is the caller's name for the targets."""
    if targets.ttft_ms is None and targets.tpot_ms is None:
        raise InvalidArgumentError(name, "must have ttft_ms, tpot_ms or both")
    for field in ("ttft_ms", "tpot_ms"):
        check_target_ms(getattr(targets, field), f"{name}.{field}")


def check_target_ms(value: float | None, name: str) -> None:
    """Raises `InvalidArgumentError`."""
    if value is not None and not 0 < value <= MAX_TARGET_MS:  # NaN is not
        raise InvalidArgumentError(name, f"must be milliseconds in (0, {MAX_TARGET_MS:.0f}], not {value:g}")


def check_age_ms(value: float, name: str) -> None:
    """How long ago a request came to its router. Raises `InvalidArgumentError`."""
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgumentError(name, f"must be milliseconds, 0 or more, not {value:g}")
