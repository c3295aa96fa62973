"""From signals to how many workers each role needs: the part of planning that knows about load.

What a rule remembers of the past it keeps to itself; time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.autoscaler.signals import FleetSignals, Need, RoleSignals


@dataclass(slots=True, frozen=True, kw_only=True)
class Targets:
    """What one worker should have, so that it is well used and still meets its latencies."""

    queued_tokens: float = 8192.0
    prefill_rate: float | None = None  # prompt tokens/s; None if it is to be learned, or predicted until then
    kv_usage: float = 0.7
    requests: float = 32.0


@dataclass(slots=True, frozen=True)
class Needs:
    prefill: Need
    decode: Need


class Rules(Protocol):
    def needs(self, now: float, signals: FleetSignals) -> Needs:
        """`now` in seconds, never decreasing. Called once for each new set of signals."""
        ...


LEAST_BUSY_S = 30.0  # seconds of work that a prefill worker's rate is learned from
UTILIZATION = 0.8  # a worker is given this share of its measured rate: beyond it, queues grow long


class TargetRules:
    """Each signal divided by its target; a role needs what its most demanding signal asks for.

    If no rate of a prefill worker is given, it is learned from the flow: what arrived and is not queued any more was
    computed by those workers that had something to compute. Until then it is what the workers' models of time say.

    Decode's load follows prefill's by the length of a prompt's queueing and computing. If arrivals are known, decode
    is therefore also given what the traffic's own P:D ratio says: workers of decode for each prompt token per second,
    learned while prefill keeps up (a prefill queue hides the decode load behind it).
    """

    def __init__(self, targets: Targets, *, memory_s: float = 600.0) -> None:
        self._targets = targets
        self._ratio = RunningRatio(memory_s)
        self._pace = PrefillPace(memory_s)

    def needs(self, now: float, signals: FleetSignals) -> Needs:
        targets = self._targets
        prefill, decode = signals.prefill, signals.decode
        arrivals = signals.arrival_tokens_per_s

        asked = [
            (
                prefill.queued_tokens / targets.queued_tokens,
                f"{prefill.queued_tokens} queued prompt tokens, {targets.queued_tokens:g} per worker",
            )
        ]
        rate, origin = targets.prefill_rate, ""
        if rate is None and (pace := self._pace.learn(now, signals)) is not None:
            rate, origin = pace * UTILIZATION, " as learned"
        elif rate is None and prefill.predicted_rate is not None:
            rate, origin = round(prefill.predicted_rate * UTILIZATION, 1), " as predicted"
        if arrivals is not None and rate is not None:
            asked.append((arrivals / rate, f"{arrivals:.0f} prompt tokens/s arrive, {rate:g} per worker{origin}"))
        prefill_need = _most(asked, prefill)

        asked = [
            (
                decode.kv_used / targets.kv_usage,
                f"KV of {decode.kv_used:.2f} workers in use, {targets.kv_usage:g} per worker",
            ),
            (
                decode.num_requests / targets.requests,
                f"{decode.num_requests} requests, {targets.requests:g} per worker",
            ),
        ]
        if arrivals is not None:
            keeps_up = prefill.queued_tokens <= targets.queued_tokens * prefill.num_ready
            if keeps_up and not decode.num_silent:
                self._ratio.add(now, max(asked)[0], arrivals)
            if (ratio := self._ratio.value()) is not None:
                asked.append(
                    (ratio * arrivals, f"{arrivals:.0f} prompt tokens/s arrive, as decode followed them so far")
                )
        return Needs(prefill_need, _most(asked, decode))


def _most(asked: list[tuple[float, str]], role: RoleSignals) -> Need:
    workers, reason = max(asked)
    return Need(workers, reason, unknown=float(role.num_silent))


class PrefillPace:
    """Prompt tokens that one prefill worker takes in a second while it is busy.

    In tokens that arrive, which is what it is compared with: those that a cache already held count as taken.
    """

    def __init__(self, memory_s: float) -> None:
        self._ratio = RunningRatio(memory_s)
        self._last: tuple[float, float, int, int] | None = None  # now, arrived, queued, workers
        self._busy_s = 0.0  # of all workers together

    def learn(self, now: float, signals: FleetSignals) -> float | None:
        """None until workers have been busy for LEAST_BUSY_S."""
        prefill, arrived = signals.prefill, signals.arrived_tokens
        if arrived is None:
            return None
        before = self._last
        self._last = now, arrived, prefill.queued_tokens, prefill.num_ready
        # A worker that came or went took its queue along: nothing is learned from that second.
        if before is not None and before[0] < now and before[3] == prefill.num_ready > 0 and not prefill.num_silent:
            elapsed = now - before[0]
            taken = (arrived - before[1]) - (prefill.queued_tokens - before[2])
            self._ratio.add(now, taken / elapsed, prefill.num_busy)
            self._busy_s += prefill.num_busy * elapsed
        pace = self._ratio.value()
        return round(pace, 1) if pace is not None and pace > 0 and self._busy_s >= LEAST_BUSY_S else None


class RunningRatio:
    """Exponentially weighted sum(a) / sum(b): a ratio of means, which bursts of either side do not bias."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._last: float | None = None
        self._first: float | None = None
        self._a = self._b = 0.0

    def add(self, now: float, a: float, b: float) -> None:
        if self._last is None or self._first is None:
            self._first = self._last = now
        elapsed = now - self._last
        self._last = now
        keep = 0.5 ** (elapsed / (self._memory_s / 2))
        self._a = self._a * keep + a * elapsed
        self._b = self._b * keep + b * elapsed

    def value(self) -> float | None:
        """None until a tenth of the memory is filled."""
        if self._last is None or self._first is None or self._last - self._first < self._memory_s / 10 or not self._b:
            return None
        return self._a / self._b
