"""Whole workers over a fake engine: real processes and gRPC, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from common.config import WorkerSettings
from common.grpc.options import CHANNEL_OPTIONS
from common.types import WorkerRole
from decode_service import servicer as decode_servicer
from prefill_service import servicer as prefill_servicer
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from tests.worker import forked_engine
from tests.worker.fronts import Front, front
from worker import engine_process
from worker.server import AddService, serve

START_PROCESS = engine_process.start_process
_NUMBERS = iter(range(10**9))


@dataclass(slots=True)
class RunningWorker:
    address: str
    channel: grpc.aio.Channel
    decode: decode_pb2_grpc.DecodeServiceAsyncStub
    prefill: prefill_pb2_grpc.PrefillServiceAsyncStub
    worker: worker_pb2_grpc.WorkerServiceAsyncStub
    process: asyncio.Task[int]  # its result is the exit code

    async def status(self) -> worker_pb2.WorkerStatus:
        return await self.worker.GetStatus(worker_pb2.GetWorkerStatusRequest(), timeout=20)


StartWorker = Callable[..., Awaitable[RunningWorker]]


def decode_request(word: int, num_tokens: int = 8, **fields: object) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(
        **{  # type: ignore[arg-type] # field by field
            "request_id": f"r{next(_NUMBERS)}",
            "prompt_token_ids": [word] * num_tokens,
            "sampling_params": types_pb2.SamplingParams(max_tokens=100),
            **fields,
        }
    )


@asynccontextmanager
async def running_worker(tmp_path: Path, **settings: object) -> AsyncIterator[RunningWorker]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    values = {"listen": "127.0.0.1:0", "kv_dir": str(tmp_path), "drain_timeout": 0.0, **settings}
    services: list[AddService] = [prefill_servicer.add_service, decode_servicer.add_service]
    process = asyncio.create_task(
        serve(WorkerSettings.model_validate(values), WorkerRole.BOTH, tmp_path, "fake", services, ready.set_result)
    )
    await asyncio.wait((process, ready), return_when=asyncio.FIRST_COMPLETED)
    if process.done():
        process.result()
    address = await ready
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        worker = RunningWorker(
            address,
            channel,
            decode_pb2_grpc.DecodeServiceStub(channel),
            prefill_pb2_grpc.PrefillServiceStub(channel),
            worker_pb2_grpc.WorkerServiceStub(channel),
            process,
        )
        try:
            yield worker
        finally:
            if not process.done():
                await worker.worker.Drain(worker_pb2.DrainRequest(timeout_s=0.0))
            await asyncio.wait({process}, timeout=20)


@pytest.fixture
async def start_worker(tmp_path: Path, fake_engines: None) -> AsyncIterator[StartWorker]:
    async with AsyncExitStack() as stack:

        async def start(**settings: object) -> RunningWorker:
            return await stack.enter_async_context(running_worker(tmp_path, **settings))

        yield start


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    forked_engine.start_server()
    monkeypatch.setattr(engine_process, "start_process", forked_engine.start_process)


@pytest.fixture
def fake_engines_on_their_own(fake_engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started as the real one is."""
    monkeypatch.setattr(engine_process, "start_process", START_PROCESS)
    monkeypatch.setattr(engine_process, "ENGINE_MODULE", "tests.support.fake_engine")


@pytest.fixture
async def prefill(tmp_path: Path, fake_engines: None) -> AsyncIterator[Front]:
    async with front(WorkerRole.PREFILL, tmp_path / "prefill") as one:
        yield one


@pytest.fixture
async def decode(tmp_path: Path, fake_engines: None) -> AsyncIterator[Front]:
    async with front(WorkerRole.DECODE, tmp_path / "decode") as one:
        yield one
