"""What is known and decided now, for everybody who asks: Prometheus, HPAs, KEDA, people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common import metrics
from common.errors import UnavailableError
from common.types import WorkerRole
from router.autoscaler.signals import ROLES, FleetSignals, MovableWorker, ScaleDecision

FRESH_S = 2.0
"""Nothing older than this is told to anybody who scales by it."""


@dataclass(slots=True, frozen=True)
class Reading:
    """One metric's value. `labels` are what a selector can pick by."""

    name: str
    value: float
    labels: Mapping[str, str]


@dataclass(slots=True, frozen=True)
class ShiftMade:
    """A worker that was told to take work of another role."""

    unix_time: float
    address: str
    roles: str  # from which to which
    reason: str
    failure: str  # why it did not; empty if it did


@dataclass(slots=True, frozen=True)
class Notice:
    at: float  # of the board's clock
    unix_time: float
    signals: FleetSignals
    decisions: Mapping[WorkerRole, ScaleDecision]
    advice: Mapping[WorkerRole, ScaleDecision] = field(default_factory=dict)  # that nobody scales by
    movable: Sequence[MovableWorker] = ()  # workers whose roles may move
    shifts: Sequence[ShiftMade] = ()  # the last ones, the newest first

    def readings(self) -> list[Reading]:
        prefill, decode = self.signals.prefill, self.signals.decode
        on_prefill, on_decode = {"role": "prefill"}, {"role": "decode"}
        found = [
            Reading("baton_prefill_queued_tokens", prefill.queued_tokens, on_prefill),
            Reading("baton_prefill_queued_tokens_per_pod", prefill.per_pod(prefill.queued_tokens), on_prefill),
            Reading("baton_decode_kv_usage", decode.kv_usage, on_decode),
            Reading("baton_decode_kv_used_pods", decode.kv_used, on_decode),
            Reading("baton_decode_requests", decode.num_requests, on_decode),
            Reading("baton_decode_requests_per_pod", decode.per_pod(decode.num_requests), on_decode),
        ]
        if self.signals.arrival_tokens_per_s is not None:
            found.append(
                Reading("baton_prefill_arrival_tokens_per_second", self.signals.arrival_tokens_per_s, on_prefill)
            )
        for role, decision in self.decisions.items():
            found.append(Reading("baton_desired_replicas", decision.desired, {"role": role.value}))
        return found


METRIC_NAMES = (
    "baton_prefill_queued_tokens",
    "baton_prefill_queued_tokens_per_pod",
    "baton_prefill_arrival_tokens_per_second",
    "baton_decode_kv_usage",
    "baton_decode_kv_used_pods",
    "baton_decode_requests",
    "baton_decode_requests_per_pod",
    "baton_desired_replicas",
)


class Board:
    """The latest notice. It is taken down when it gets old: no value is better than a wrong one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._notice: Notice | None = None
        self._news = asyncio.Event()

    def put(
        self,
        signals: FleetSignals,
        decisions: Mapping[WorkerRole, ScaleDecision],
        advice: Mapping[WorkerRole, ScaleDecision] | None = None,
        movable: Sequence[MovableWorker] = (),
        shifts: Sequence[ShiftMade] = (),
    ) -> None:
        self._notice = notice = Notice(
            self._clock(), time.time(), signals, dict(decisions), dict(advice or {}), tuple(movable), tuple(shifts)
        )
        _export(notice)
        self._news.set()
        self._news = asyncio.Event()

    def fresh(self) -> Notice:
        """Raises `UnavailableError` if there is none, or only an old one."""
        if self._notice is None:
            raise UnavailableError("the fleet has not been read yet")
        age = self._clock() - self._notice.at
        if age > FRESH_S:
            raise UnavailableError(f"the fleet was last read {age:.1f} s ago")
        return self._notice

    async def changed(self, timeout_s: float) -> None:
        """Returns after the next notice, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return


def _export(notice: Notice) -> None:
    signals = notice.signals
    metrics.prefill_queued_tokens.set(signals.prefill.queued_tokens)
    metrics.prefill_queued_tokens_per_pod.set(signals.prefill.per_pod(signals.prefill.queued_tokens))
    metrics.prefill_arrival_tokens.set(signals.arrival_tokens_per_s or 0.0)
    metrics.decode_kv_usage.set(signals.decode.kv_usage)
    metrics.decode_kv_used_pods.set(signals.decode.kv_used)
    metrics.decode_requests.set(signals.decode.num_requests)
    metrics.decode_requests_per_pod.set(signals.decode.per_pod(signals.decode.num_requests))
    metrics.autoscaler_held_requests.set(signals.num_held_requests)
    for role in (*ROLES, *([WorkerRole.BOTH] if WorkerRole.BOTH in notice.decisions else [])):
        metrics.autoscaler_workers.labels(role.value, "ready").set(signals.of(role).num_ready)
        metrics.autoscaler_workers.labels(role.value, "silent").set(signals.of(role).num_silent)
    for role, decision in notice.decisions.items():
        metrics.desired_replicas.labels(role.value).set(decision.desired)
        metrics.needed_replicas.labels(role.value).set(decision.needed)
    for role, decision in notice.advice.items():
        metrics.advised_replicas.labels(role.value).set(decision.desired)
