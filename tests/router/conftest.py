"""A router on free ports in gateway of fake workers; all real sockets, all gone after each test."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import openai
import pytest
from prometheus_client import REGISTRY

from common.config import RouterSettings
from common.types import WorkerRole
from protos.baton.v1 import inference_pb2_grpc, router_pb2_grpc
from router.api.rest.app import BODIES
from router.api.rest.openapi import schemas
from router.fleet import served_model
from router.fleet.patience import PATIENCE, Patience
from router.running.retries import DispatchLimits
from router.server import serve
from tests.support.fake_worker import FakeWorker
from text.tokenizer import Tokenizer, load_tokenizer

schemas(BODIES)  # each process that starts a router does it once, if the one that forks them has not done so

SETTINGS = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "drain_timeout": 5.0}


@dataclass(slots=True)
class RunningRouter:
    url: str
    grpc_address: str
    channel: grpc.aio.Channel
    openai: openai.AsyncOpenAI
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def inference(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def fleet(self) -> router_pb2_grpc.RouterServiceAsyncStub:
        return router_pb2_grpc.RouterServiceStub(self.channel)


LIMITS = DispatchLimits(recovery_wait_s=1.5)
StartWorker = Callable[..., Awaitable[FakeWorker]]
StartRouter = Callable[..., Awaitable[RunningRouter]]


@pytest.fixture(autouse=True)
def no_certificates_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """httpx reads all CA certificates for each client, which takes as long as many a test. Of a folder it reads those
    that it needs, when it does. Tests of TLS name their own."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path_factory.getbasetemp()))


@functools.lru_cache(maxsize=16)
def _tokenizer(files: tuple[tuple[str, bytes], ...]) -> Tokenizer:
    return load_tokenizer(dict(files))


@pytest.fixture(autouse=True)
def tokenizers_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most workers of tests have the same files. A router compiles their template for longer than many a test takes."""
    monkeypatch.setattr(served_model, "load_tokenizer", lambda files: _tokenizer(tuple(sorted(files.items()))))


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    workers: list[FakeWorker] = []

    async def start(role: WorkerRole = WorkerRole.DECODE, **attributes: str) -> FakeWorker:
        worker = FakeWorker(role, **attributes)
        await worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        await worker.stop()


async def reaches(name: str, value: float, **labels: str) -> None:
    """Returns once a metric of this process is at least `value`."""
    async with asyncio.timeout(20):
        while sample(name, **labels) < value:  # noqa: ASYNC110 (a metric cannot be awaited)
            await asyncio.sleep(0.005)


async def all_seen(endpoints: dict[WorkerRole, int]) -> None:
    """Returns once the router has read the load of every worker; it is ready before, with the first one."""
    for role, number in endpoints.items():
        await reaches("baton_router_endpoints", number, role=role, state="ready")


def sample(name: str, **labels: str) -> float:
    """A metric's value in this process. The others are not looked at: this is asked again and again."""
    for metric in REGISTRY.restricted_registry([name]).collect():
        for one in metric.samples:
            if (one.name, one.labels) == (name, labels):
                return one.value
    return 0.0


@pytest.fixture
async def start_router(start_worker: StartWorker) -> AsyncIterator[StartRouter]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *decode: FakeWorker,
            prefill: tuple[FakeWorker, ...] = (),
            limits: DispatchLimits = LIMITS,
            patience: Patience = PATIENCE,
            **settings: object,
        ) -> RunningRouter:
            addresses = {
                "decode": tuple(worker.address for worker in decode),
                "prefill": tuple(worker.address for worker in prefill),
            }
            is_ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
            stop = asyncio.Event()
            task = asyncio.create_task(
                serve(
                    RouterSettings.model_validate({**SETTINGS, **addresses, **settings}),
                    lambda url, address: is_ready.set_result((url, address)),
                    stop,
                    limits,
                    patience=patience,
                )
            )
            futures: set[asyncio.Future[object]] = {task, is_ready}  # type: ignore[arg-type]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED, timeout=60)
            if task.done():
                task.result()
            url, address = await is_ready
            both = {*decode} & {*prefill}
            await all_seen(
                {
                    WorkerRole.BOTH: len(both),
                    WorkerRole.DECODE: len({*decode} - both),
                    WorkerRole.PREFILL: len({*prefill} - both),
                }
            )
            channel = grpc.aio.insecure_channel(address)
            plain = openai.DefaultAsyncHttpxClient(verify=False)  # to read CA certificates takes as long as many a test
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=plain)

            async def end() -> None:
                await client.close()
                await channel.close()
                stop.set()
                await task

            stack.push_async_callback(end)
            return RunningRouter(url, address, channel, client, stop, task)

        yield start


@pytest.fixture
async def worker(start_worker: StartWorker) -> FakeWorker:
    return await start_worker()


@pytest.fixture
async def router(worker: FakeWorker, start_router: StartRouter) -> RunningRouter:
    return await start_router(worker)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
