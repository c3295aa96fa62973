"""KEDA's external scaler: the same numbers for those who scale by ScaledObjects, to and from zero.

A trigger's metadata says what it is about:

    role: prefill | decode
    metric: queued_tokens | kv_usage | requests | desired_replicas   (several, with commas; the role's own if unset)
    target: "8192"                                                    (with one metric; the autoscaler's if unset)

KEDA divides a metric by its target to get replicas, so every metric is a sum over workers. A role is active while the
planner wants a worker of it; with `--prefill-min 0` and the like that ends after the idle timeout.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import grpc

from common.errors import InvalidArgumentError, UnavailableError
from common.types import WorkerRole
from protos.keda import externalscaler_pb2 as pb
from router.autoscaler.board import Board, Notice
from router.autoscaler.rules import Targets

SERVICE = pb.DESCRIPTOR.services_by_name["ExternalScaler"]
KEEP_TELLING_S = 10.0  # a stream says at least this often that it lives

Context = grpc.aio.ServicerContext[object, object]

_DEFAULTS = {
    WorkerRole.PREFILL: ("queued_tokens",),
    WorkerRole.DECODE: ("kv_usage", "requests"),
    WorkerRole.BOTH: ("desired_replicas",),
}
_METRICS = ("queued_tokens", "kv_usage", "requests", "desired_replicas")


@dataclass(slots=True, frozen=True)
class Trigger:
    role: WorkerRole
    targets: Mapping[str, float]  # by metric


def read_trigger(metadata: Mapping[str, str], targets: Targets) -> Trigger:
    """Raises `InvalidArgumentError` naming the key."""
    role = next((role for role in _DEFAULTS if role.value == metadata.get("role")), None)
    if role is None:
        raise InvalidArgumentError("role", f"must be prefill, decode or both, not {metadata.get('role', '')!r}")
    names = [name.strip() for name in metadata.get("metric", "").split(",") if name.strip()] or _DEFAULTS[role]
    for name in names:
        if name not in _METRICS:
            raise InvalidArgumentError("metric", f"must be one of {', '.join(_METRICS)}, not {name!r}")
        if role is WorkerRole.BOTH and name != "desired_replicas":
            raise InvalidArgumentError("metric", f"must be desired_replicas for role both, not {name!r}")
    defaults = {
        "queued_tokens": targets.queued_tokens,
        "kv_usage": targets.kv_usage,
        "requests": targets.requests,
        "desired_replicas": 1.0,
    }
    chosen = {name: defaults[name] for name in names}
    if text := metadata.get("target"):
        if len(chosen) != 1:
            raise InvalidArgumentError("target", f"is for one metric, and there are {len(chosen)}: name one")
        chosen = dict.fromkeys(chosen, _positive(text))
    return Trigger(role, chosen)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise InvalidArgumentError("target", f"must be a number above 0, not {text!r}")
    return value


def value_of(name: str, role: WorkerRole, notice: Notice) -> float:
    """Summed over the role's workers."""
    signals = notice.signals.of(role)
    if name == "queued_tokens":
        return signals.queued_tokens
    if name == "kv_usage":
        return signals.kv_used
    if name == "requests":
        return signals.num_requests
    return _desired(role, notice)


def _desired(role: WorkerRole, notice: Notice) -> int:
    if role not in notice.decisions:
        raise UnavailableError(f"nothing is decided about workers of {role.value} roles (--move-roles)")
    return notice.decisions[role].desired


class ExternalScaler:
    """Answers UNAVAILABLE if nothing fresh is known, so that KEDA keeps the replicas as they are."""

    def __init__(self, board: Board, targets: Targets) -> None:
        self._board = board
        self._targets = targets

    async def IsActive(self, request: pb.ScaledObjectRef, _context: Context) -> pb.IsActiveResponse:  # noqa: N802
        return pb.IsActiveResponse(result=self._is_active(request))

    async def StreamIsActive(  # noqa: N802
        self, request: pb.ScaledObjectRef, _context: Context
    ) -> AsyncGenerator[pb.IsActiveResponse, None]:
        told: bool | None = None
        while True:
            active = self._is_active(request)
            if active != told:
                told = active
                yield pb.IsActiveResponse(result=active)
            await self._board.changed(KEEP_TELLING_S)

    async def GetMetricSpec(  # noqa: N802
        self, request: pb.ScaledObjectRef, _context: Context
    ) -> pb.GetMetricSpecResponse:
        return self._specs(request)

    async def StreamMetricSpec(  # noqa: N802
        self, request: pb.ScaledObjectRef, _context: Context
    ) -> AsyncGenerator[pb.GetMetricSpecResponse, None]:
        yield self._specs(request)  # targets are settings: they change with the process, which ends the stream
        while True:
            await self._board.changed(KEEP_TELLING_S)

    async def GetMetrics(self, request: pb.GetMetricsRequest, _context: Context) -> pb.GetMetricsResponse:  # noqa: N802
        trigger = read_trigger(request.scaledObjectRef.scalerMetadata, self._targets)
        if request.metricName not in trigger.targets:
            raise InvalidArgumentError("metricName", f"the trigger has no metric {request.metricName!r}")
        value = value_of(request.metricName, trigger.role, self._board.fresh())
        metric = pb.MetricValue(metricName=request.metricName, metricValue=math.ceil(value), metricValueFloat=value)
        return pb.GetMetricsResponse(metricValues=[metric])

    def _is_active(self, request: pb.ScaledObjectRef) -> bool:
        role = read_trigger(request.scalerMetadata, self._targets).role
        return _desired(role, self._board.fresh()) > 0

    def _specs(self, request: pb.ScaledObjectRef) -> pb.GetMetricSpecResponse:
        targets = read_trigger(request.scalerMetadata, self._targets).targets
        return pb.GetMetricSpecResponse(
            metricSpecs=[
                pb.MetricSpec(metricName=name, targetSize=math.ceil(target), targetSizeFloat=target)
                for name, target in targets.items()
            ]
        )
