"""Asks a worker who it is, and reads its load for as long as the stream lasts; then it begins anew.

connecting ── GetInfo ──> known ── WatchLoad ──> READY / DRAINING ── stream ends, or silence ──> UNREACHABLE ─┐
    ^─────────────────────────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import grpc

from common import metrics
from common.errors import UnavailableError
from common.types import WorkerLoad, WorkerState
from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from protos.convert import sampling_parameters_of, state_of
from protos.messages import value_of
from router.fleet.block_watch import BlockWatch
from router.fleet.patience import PATIENCE, Patience
from router.fleet.reports import reports, why_unread
from router.fleet.worker import WorkerRecord
from router.fleet.worker_channels import WorkerChannels
from router.fleet.worker_info import batch_time_of, false_info

log = logging.getLogger(__name__)

INFO_TIMEOUT_S = 5.0
RETRY_S = 0.2


class WorkerWatch:
    """One for all workers of a router."""

    def __init__(
        self,
        blocks: BlockWatch,
        channels: WorkerChannels,
        learn: Callable[[WorkerRecord, worker_pb2_grpc.WorkerServiceAsyncStub], Awaitable[None]],
        set_state: Callable[[WorkerRecord, WorkerState, str], None],
        role_changed: Callable[[WorkerRecord], None],
        patience: Patience = PATIENCE,
    ) -> None:
        """`learn` is called when a worker has said who it is, `set_state` with each state and what the problem is,
        `role_changed` when it takes work of another role."""
        self._blocks = blocks
        self._channels = channels
        self._learn = learn
        self._set_state = set_state
        self._role_changed = role_changed
        self._patience = patience

    async def run(self, worker: WorkerRecord) -> None:
        """Watches the worker until cancelled."""
        while True:
            self._channels.renew(worker)
            stub = worker_pb2_grpc.WorkerServiceStub(worker.channel)
            try:
                await self._ask(worker, stub)
                await self._learn(worker, stub)
                async with self._following_blocks(worker, stub):
                    await self._read_load(worker, stub)
                problem = "its load stream ended"
            except (TimeoutError, UnavailableError, grpc.aio.AioRpcError) as error:
                problem = why_unread(error, self._patience.silence_s)
            except Exception as error:  # one worker's odd answer must not end the watch
                log.exception("watching a worker failed", extra={"address": worker.address})
                problem = repr(error)
            self._set_state(worker, WorkerState.UNREACHABLE, problem)
            await asyncio.sleep(RETRY_S)

    async def _ask(self, worker: WorkerRecord, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        """Raises `UnavailableError` if the answer cannot be."""
        info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=INFO_TIMEOUT_S, wait_for_ready=True)
        if false := false_info(info):
            _note_false(worker, false)
            raise UnavailableError(false)
        worker.info, worker.parameters = info, sampling_parameters_of(info)
        worker.batch_time = batch_time_of(info)
        worker.ask_again_at = time.monotonic() + self._patience.model_s
        worker.changed()

    @contextlib.asynccontextmanager
    async def _following_blocks(
        self, worker: WorkerRecord, stub: worker_pb2_grpc.WorkerServiceAsyncStub
    ) -> AsyncIterator[None]:
        """Follows the worker's blocks while the worker reports its load."""
        epoch = worker.info.epoch if worker.info else ""
        following = asyncio.create_task(self._blocks.follow(worker.address, epoch, stub))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait((following,))

    async def _read_load(self, worker: WorkerRecord, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        call = stub.WatchLoad(worker_pb2.WatchLoadRequest(), wait_for_ready=True)
        try:
            async with aclosing(reports(call, worker_pb2.WorkerLoad, self._patience.silence_s)) as loads:
                async for load in loads:
                    if worker.info is None or (load.epoch and load.epoch != worker.info.epoch):
                        return  # another process answers at this address now: ask who it is
                    now = time.monotonic()
                    if load.batch_time_version != worker.info.batch_time.version and now >= worker.ask_again_at:
                        epoch = worker.info.epoch
                        await self._ask(worker, stub)
                        if worker.info.epoch != epoch:
                            return
                    if worker.take_role(load):
                        self._role_changed(worker)
                    worker.take_load(value_of(load, WorkerLoad), now, load.counted_requests)
                    self._set_state(worker, state_of(load.state), "")
        finally:
            call.cancel()


def _note_false(worker: WorkerRecord, problem: str) -> None:
    """Logs and counts an impossible value once, even if the worker repeats it."""
    if problem != worker.problem:
        metrics.router_false_workers.labels("info").inc()
        log.error("a worker says what cannot be", extra={"address": worker.address, "reason": problem})
