"""WorkerService: what a worker tells routers and operators about itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from common.block_hash import HASH_BYTES, root_hash
from common.cache_hints import MAX_RETAIN_S, check_retain_s
from common.errors import IncompatibleError, InvalidArgumentError
from common.logs import LEVELS
from common.model_files import tokenizer_files
from common.types import WorkerLoad
from common.version import VERSION
from engine import messages as m
from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from protos.convert import SAMPLING_PARAMETERS, role_of, role_to_proto, state_to_proto
from protos.messages import message_of
from worker.role import Pin
from worker.shell import Worker, check_hint, check_names

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # load is repeated at least this often

NUM_PROMPT_WATCHERS = 64  # routers and autoscalers that get each report of the load at once;
MAX_REPORTS_PER_S = 1000  # more of them take turns

_ACTIONS = {
    worker_pb2.CACHE_ACTION_RETAIN: m.CacheAction.RETAIN,
    worker_pb2.CACHE_ACTION_EVICT: m.CacheAction.EVICT,
    worker_pb2.CACHE_ACTION_PREFETCH: m.CacheAction.PREFETCH,
}

MAX_REASON_CHARS = 1024
_PINS: dict[int, Pin | None] = {
    worker_pb2.SetWorkerRoleRequest.PIN_UNSPECIFIED: None,
    worker_pb2.SetWorkerRoleRequest.PIN_SET: "set",
    worker_pb2.SetWorkerRoleRequest.PIN_CLEARED: "cleared",
}

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._num_watchers = 0
        self._reading = asyncio.Lock()
        self._tokenizer: worker_pb2.GetTokenizerResponse | None = None  # read once, so that frequent calls read no disk

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.WorkerInfo:  # noqa: ARG002, N802
        worker, ready = self._worker, self._worker.ready
        return worker_pb2.WorkerInfo(
            worker_id=worker.worker_id,
            role=role_to_proto(worker.role),
            epoch=worker.epoch,
            model=worker.model_name,
            fingerprint=worker.fingerprint,
            connector=worker.settings.connector,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            block_size=ready.spec.block_size,
            root_hash=root_hash(worker.fingerprint),
            eos_token_ids=ready.eos_token_ids,
            dtype=ready.spec.dtype,
            dtype_reason=ready.dtype_reason,
            fingerprint_but_dtype=ready.spec.fingerprint_but_dtype(),
            device=ready.device,
            device_reason=ready.device_reason,
            kernels=ready.kernels,
            kernels_reason=ready.kernels_reason,
            version=VERSION,
            sampling_parameters=sorted(SAMPLING_PARAMETERS),
            chat_template_error=worker.chat_template_error,
            batch_time=_batch_time(worker, with_model=True),
            splits_prompts=True,
        )

    async def WatchLoad(  # noqa: N802
        self,
        request: worker_pb2.WatchLoadRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[worker_pb2.WorkerLoad]:
        worker = self._worker
        self._num_watchers += 1
        try:
            while not worker.engine.died.is_set():
                yield _load(worker, worker.engine.load, worker.engine.counted_requests)
                if self._num_watchers <= NUM_PROMPT_WATCHERS:
                    await worker.engine.load_change(HEARTBEAT_S)
                else:  # as many streams as the port allows come to their turn before a router gives a silent one up
                    await asyncio.sleep(self._num_watchers / MAX_REPORTS_PER_S)
        finally:
            self._num_watchers -= 1

    async def WatchBlocks(  # noqa: N802
        self,
        request: worker_pb2.WatchBlocksRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[worker_pb2.BlockChanges]:
        epoch = self._worker.epoch
        known = request.sequence if request.epoch == epoch else None
        async with contextlib.aclosing(self._worker.engine.blocks.watch(known)) as changes:
            async for change in changes:
                yield worker_pb2.BlockChanges(
                    epoch=epoch,
                    sequence=change.sequence,
                    starts_list=change.starts_list,
                    stored=change.stored,
                    removed=change.removed,
                )

    async def HintCache(  # noqa: N802
        self,
        request: worker_pb2.HintCacheRequest,
        context: Context,  # noqa: ARG002
    ) -> worker_pb2.HintCacheResponse:
        worker, names = self._worker, request.block_hashes
        worker.check_fingerprint(request.fingerprint)
        if request.action not in _ACTIONS:
            raise InvalidArgumentError("action", f"{request.action} is not known")
        if len(names) % HASH_BYTES or len(names) // HASH_BYTES > worker.ready.max_model_len:
            raise InvalidArgumentError("block_hashes", f"must have {HASH_BYTES} bytes for each block of one prompt")
        if request.seconds:
            check_retain_s(request.seconds, MAX_RETAIN_S, "seconds")
        check_hint(None, request.tenant)
        hinted = await worker.engine.calls.hint_cache(
            _ACTIONS[request.action],
            [names[start : start + HASH_BYTES] for start in range(0, len(names), HASH_BYTES)],
            tenant=request.tenant,
            seconds=request.seconds,
        )
        return worker_pb2.HintCacheResponse(
            num_device_blocks=hinted.num_device_blocks,
            num_host_blocks=hinted.num_host_blocks,
            num_stored_blocks=hinted.num_stored_blocks,
            failure=hinted.failure,
        )

    async def GetStatus(  # noqa: N802
        self,
        request: worker_pb2.GetWorkerStatusRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> worker_pb2.WorkerStatus:
        status = await self._worker.engine.calls.status()
        load = _load(self._worker, status.load)
        return worker_pb2.WorkerStatus(
            load=load, integrity=status.integrity, batch_time=_batch_time(self._worker, with_model=False)
        )

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:  # noqa: ARG002, N802
        if request.HasField("timeout_s"):
            if not math.isfinite(request.timeout_s) or request.timeout_s < 0:
                raise InvalidArgumentError("timeout_s", "must be a number of seconds, 0 at least")
            self._worker.drain_timeout = request.timeout_s
        self._worker.drain_requested.set()
        return worker_pb2.DrainResponse()

    async def Pause(  # noqa: N802
        self,
        request: worker_pb2.PauseWorkerRequest,  # noqa: ARG002
        context: Context,
    ) -> worker_pb2.PauseWorkerResponse:
        await self._worker.pause(is_paused=True)
        num_streams = len(self._worker.active)
        log.warning("paused: no new work is taken", extra={"peer": context.peer(), "num_streams": num_streams})
        return worker_pb2.PauseWorkerResponse(num_streams=num_streams)

    async def Resume(  # noqa: N802
        self,
        request: worker_pb2.ResumeWorkerRequest,  # noqa: ARG002
        context: Context,
    ) -> worker_pb2.ResumeWorkerResponse:
        await self._worker.pause(is_paused=False)
        log.warning("resumed: new work is taken again", extra={"peer": context.peer()})
        return worker_pb2.ResumeWorkerResponse()

    async def SetRole(  # noqa: N802
        self, request: worker_pb2.SetWorkerRoleRequest, context: Context
    ) -> worker_pb2.SetWorkerRoleResponse:
        worker, role = self._worker, role_of(request.role)
        if role is None:
            raise InvalidArgumentError("role", "must be prefill, decode or both")
        if request.pin not in _PINS:
            raise InvalidArgumentError("pin", f"{request.pin} is not known")
        if len(request.reason) > MAX_REASON_CHARS or not request.reason.isprintable():
            raise InvalidArgumentError("reason", f"must be printable, with at most {MAX_REASON_CHARS} characters")
        if request.epoch not in ("", worker.epoch):
            raise IncompatibleError("another process answers at this address by now")
        num_shifts = request.num_role_shifts if request.epoch else None
        reason = request.reason or f"asked by {context.peer()}"
        num_streams = await worker.set_role(role, _PINS[request.pin], num_shifts, reason)
        return worker_pb2.SetWorkerRoleResponse(num_streams=num_streams, num_role_shifts=worker.roles.num_shifts)

    async def Abort(self, request: worker_pb2.AbortWorkRequest, context: Context) -> worker_pb2.AbortWorkResponse:  # noqa: N802
        if not request.request_id:
            raise InvalidArgumentError("request_id", "is missing")
        check_names(request.request_id, "")
        num_streams = self._worker.abort(request.request_id, "an operator ended this request")
        if num_streams:
            told = {"request_id": request.request_id, "peer": context.peer(), "num_streams": num_streams}
            log.warning("aborted by an operator", extra=told)
        return worker_pb2.AbortWorkResponse(num_streams=num_streams)

    async def FlushCache(  # noqa: N802
        self,
        request: worker_pb2.FlushWorkerCacheRequest,  # noqa: ARG002
        context: Context,
    ) -> worker_pb2.FlushWorkerCacheResponse:
        flushed = await self._worker.engine.calls.flush_cache()
        numbers = {"num_device_blocks": flushed.num_device_blocks, "num_host_blocks": flushed.num_host_blocks}
        log.warning("the cache was flushed", extra={"peer": context.peer(), **numbers})
        return worker_pb2.FlushWorkerCacheResponse(**numbers)

    async def SetLogLevel(  # noqa: N802
        self,
        request: worker_pb2.SetWorkerLogLevelRequest,
        context: Context,  # noqa: ARG002
    ) -> worker_pb2.SetWorkerLogLevelResponse:
        if request.level not in LEVELS:
            raise InvalidArgumentError("level", f"must be one of {', '.join(LEVELS)}")
        self._worker.order_level(request.level)
        return worker_pb2.SetWorkerLogLevelResponse()

    async def GetTokenizer(  # noqa: N802
        self,
        request: worker_pb2.GetTokenizerRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> worker_pb2.GetTokenizerResponse:
        async with self._reading:
            if self._tokenizer is None:
                files = await asyncio.to_thread(tokenizer_files, self._worker.model_dir)
                self._tokenizer = worker_pb2.GetTokenizerResponse(
                    files=[worker_pb2.TokenizerFile(name=name, content=content) for name, content in files.items()]
                )
        return self._tokenizer

    async def Profile(  # noqa: N802
        self,
        request: worker_pb2.ProfileRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[worker_pb2.ProfilePart]:
        async with contextlib.aclosing(self._worker.profiles.take(request)) as parts:
            async for part in parts:
                yield part


def _load(worker: Worker, load: WorkerLoad, counted: Sequence[int] = ()) -> worker_pb2.WorkerLoad:
    known, roles = worker.engine.batch_time, worker.roles
    return message_of(
        load,
        worker_pb2.WorkerLoad,
        state=state_to_proto(worker.state),
        epoch=worker.epoch,
        batch_time_version=0 if known is None else known.version,
        role=role_to_proto(roles.role) if roles.moves else worker_pb2.WORKER_ROLE_UNSPECIFIED,
        num_role_shifts=roles.num_shifts,
        role_pinned=roles.is_pinned,
        counted_requests=counted,
    )


def _batch_time(worker: Worker, *, with_model: bool) -> worker_pb2.BatchTime | None:
    known = worker.engine.batch_time
    if known is None:
        return None
    return worker_pb2.BatchTime(
        model=known.model if with_model else b"",
        source=known.source,
        version=known.version,
        age_s=max(0.0, time.monotonic() - known.made_at),
        num_steps=known.num_steps,
        error_median=known.error_median,
        error_p90=known.error_p90,
        drifts=known.drifts,
    )


def add_service(worker: Worker, server: grpc.aio.Server) -> str:
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(worker), server)
    return worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
