"""Tells workers which role they take work of from now on, as a `RolePlanner` wants it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import grpc

from common import metrics
from common.grpc.transport import Channels
from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from protos.convert import role_to_proto
from router.autoscaler.board import ShiftMade
from router.autoscaler.roles import Shift

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
NUM_KEPT = 50
MAX_WORDS = 300  # of what a worker says


class RoleOrders:
    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._made: deque[ShiftMade] = deque(maxlen=NUM_KEPT)

    def made(self) -> Sequence[ShiftMade]:
        """The newest first."""
        return tuple(self._made)

    async def carry_out(self, shift: Shift) -> None:
        """A failure is logged and counted. Whether the role has changed, the worker's reports say: a planner decides by
        these anew, and a worker refuses an order that was decided by older ones."""
        worker, failure = shift.worker, ""
        order = worker_pb2.SetWorkerRoleRequest(
            role=role_to_proto(shift.role),
            epoch=worker.epoch,
            num_role_shifts=worker.num_shifts,
            reason=shift.reason,
        )
        channel = self._channels.open(worker.address)
        try:
            await worker_pb2_grpc.WorkerServiceStub(channel).SetRole(order, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            failure = f"{error.code().name}: {(error.details() or '')[:MAX_WORDS]}"
        finally:
            await channel.close()
        told = {"address": worker.address, "role": shift.words, "reason": shift.reason}
        if failure:
            metrics.autoscaler_failures.labels("role").inc()
            log.warning("a role could not be changed", extra={**told, "failure": failure})
        else:
            metrics.autoscaler_role_shifts.labels(shift.role.value).inc()
            log.info("role changed", extra=told)
        self._made.appendleft(ShiftMade(round(time.time(), 3), worker.address, shift.words, shift.reason, failure))
