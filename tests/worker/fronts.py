"""The gRPC fronts of workers in this process, each with a fake engine in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec

from common.config import WorkerSettings
from common.grpc.options import CHANNEL_OPTIONS
from common.types import WorkerRole
from decode_service import servicer as decode_servicer
from prefill_service import servicer as prefill_servicer
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from tests.integration.stack import descendants
from tests.support.fake_engine import SPEC, Script
from tests.support.fake_prefill_worker import FakePrefillWorker
from worker.server import AddService, serve

PATIENCE_S = 60.0


@dataclass(slots=True)
class Front:
    """One worker, served by a task of this process."""

    role: WorkerRole
    folder: Path
    address: str
    task: asyncio.Task[int]  # `serve`; its result is the process's exit code
    engine_pid: int
    channel: grpc.aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)

    @property
    def decode(self) -> decode_pb2_grpc.DecodeServiceAsyncStub:
        return decode_pb2_grpc.DecodeServiceStub(self.channel)

    @property
    def prefill(self) -> prefill_pb2_grpc.PrefillServiceAsyncStub:
        return prefill_pb2_grpc.PrefillServiceStub(self.channel)

    @property
    def worker(self) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    def commands(self) -> list[dict[str, Any]]:
        """What the engine was told, in order."""
        log = self.folder / f"{self.role.value}.engine.commands"
        return [msgspec.json.decode(line) for line in log.read_text().splitlines()] if log.exists() else []

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [command for command in self.commands() if command["type"] == kind]

    async def load(self) -> worker_pb2.WorkerLoad:
        return (await self.worker.GetStatus(worker_pb2.GetWorkerStatusRequest())).load

    async def settled(self) -> None:
        """Returns once the engine holds no request and no lease."""
        await until(self._is_idle, f"{self.role.value} holds nothing")

    async def _is_idle(self) -> bool:
        load = await self.load()
        return not load.num_requests_running and not load.num_leases and load.num_free_blocks == load.num_blocks

    async def drain(self, timeout_s: float) -> None:
        await self.worker.Drain(worker_pb2.DrainRequest(timeout_s=timeout_s))


async def until(is_true: Callable[[], Any], what: str) -> None:
    """Polls a function, or a coroutine function, until it gives something true. Raises AssertionError."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            outcome = is_true()
            if await outcome if asyncio.iscoroutine(outcome) else outcome:
                return
            await asyncio.sleep(0.01)
    raise AssertionError(what)


@asynccontextmanager
async def front(role: WorkerRole, folder: Path, **settings: Any) -> AsyncIterator[Front]:
    """A worker that serves. It is ended afterwards, if the test has not done that."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    services: dict[WorkerRole, list[AddService]] = {
        WorkerRole.PREFILL: [prefill_servicer.add_service],
        WorkerRole.DECODE: [decode_servicer.add_service],
        WorkerRole.BOTH: [prefill_servicer.add_service, decode_servicer.add_service],
    }
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    before = descendants_of_this()
    task = asyncio.create_task(
        serve(WorkerSettings(listen="127.0.0.1:0", **settings), role, folder, "fake", services[role], ready.set_result)
    )
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    (engine_pid,) = descendants_of_this() - before
    one = Front(role, folder, ready.result(), task, engine_pid)
    try:
        yield one
    finally:
        if not task.done():
            await one.drain(0.0)
        await task
        await one.channel.close()


def descendants_of_this() -> set[int]:
    return descendants(os.getpid())


def request_of(
    prompt: list[int], prefill: Sequence[Front | FakePrefillWorker] = (), script: Script | None = None, **fields: Any
) -> decode_pb2.DecodeRequest:
    """As a router asks a decode worker."""
    max_tokens = fields.pop("max_tokens", 5)
    return decode_pb2.DecodeRequest(
        request_id=fields.pop("request_id", "r"),
        fingerprint=SPEC.fingerprint(),
        prompt_token_ids=prompt,
        sampling_params=types_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
        cache_salt=script.salt() if script else "",
        prefill_addresses=[one.address for one in prefill],
        **fields,
    )


@dataclass(slots=True)
class Told:
    """What a decode worker said."""

    token_ids: list[int] = field(default_factory=list)
    report: types_pb2.RequestReport = field(default_factory=types_pb2.RequestReport)
    finish_reason: int = 0
    num_offers: int = 0
    blamed: list[str] = field(default_factory=list)


async def read(call: AsyncIterable[decode_pb2.DecodeEvent], *, num_tokens: int | None = None) -> Told:
    """To the end, or until so many tokens have come."""
    told = Told()
    async with asyncio.timeout(PATIENCE_S):
        async for event in call:
            told.token_ids += [token.token_id for token in event.tokens]
            told.num_offers += event.offers_handover
            told.finish_reason = event.finish_reason
            if event.HasField("report"):
                told.report.CopyFrom(event.report)
                told.blamed = list(event.blamed_prefill_addresses)
            if num_tokens is not None and len(told.token_ids) >= num_tokens:
                break
    return told
