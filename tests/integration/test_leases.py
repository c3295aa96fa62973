"""How long a prefill worker keeps its blocks, by how the stream to its decode worker ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import REGISTRY

import prefill_service.servicer as prefill_service
from baton.client.sync_client import Client
from common.config import WorkerSettings
from common.errors import DeadlineError
from common.grpc.options import LOSS_NOTICED_S, MAX_MESSAGE_BYTES, worker_server_options
from common.types import WorkerRole
from protos.baton.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.faults import watch
from tests.integration.ask import Salt
from tests.integration.stack import CALL_TIMEOUT_S, Fleet, running, wait_for
from tests.integration.tiny import tiny_fleet
from worker.drain import drain
from worker.lease import lease_grace_s
from worker.shell import Worker

pytestmark = pytest.mark.timeout(600)

NUM_PROMPT_TOKENS = 100
FOREVER_S = 3600.0


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(model_dir)
    return model_dir


@asynccontextmanager
async def prefill_worker(model_dir: Path, kv_dir: Path, connector: str) -> AsyncIterator[Worker]:
    """A front in this process, with an engine of its own."""
    settings = WorkerSettings(
        connector=connector, kv_dir=str(kv_dir), dtype="float32", num_threads=1, num_blocks=64, chunk_size=32
    )
    worker = Worker(settings, WorkerRole.PREFILL, model_dir, "tiny")
    await worker.engine.spawn()
    server = grpc.aio.server(options=worker_server_options(max_message_bytes=MAX_MESSAGE_BYTES, max_streams=1024))
    try:
        prefill_service.add_service(worker, server)
        worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await worker.wait_ready()
        await server.start()
        yield worker
    finally:
        await server.stop(0)
        await worker.engine.stop()


class Line:
    """A connection through a relay that can break it: neither end says a word, as when a process is killed."""

    def __init__(self, address: str) -> None:
        self._target = address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, there_writer]
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._copy(source, sink))
            self._tasks.add(task)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
        except ConnectionError:
            return  # it was broken


Call = grpc.aio.StreamStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]


async def all_announced(channel: grpc.aio.Channel) -> Call:
    """A stream that has announced every block of a prompt."""
    call: Call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill()
    start = prefill_pb2.PrefillStart(
        request_id="leased",
        prompt_token_ids=random_prompt(random.Random(1), NUM_PROMPT_TOKENS),
        sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=1),
    )
    await call.write(prefill_pb2.PrefillRequest(start=start))
    num_due, has_token = -(-NUM_PROMPT_TOKENS // 16), False
    while num_due or not has_token:
        event = await call.read()
        assert isinstance(event, prefill_pb2.PrefillEvent)
        num_due -= len(event.blocks_ready.blocks) + len(event.first_token.blocks_ready.blocks)
        has_token = has_token or event.HasField("first_token")
    return call


async def end(how: str, call: Call, line: Line) -> None:
    match how:
        case "release":
            await call.write(prefill_pb2.PrefillRequest(release=prefill_pb2.ReleaseBlocks()))
            await call.done_writing()
        case "half-close":
            await call.done_writing()
        case "cancel":
            call.cancel()
        case "break":
            await line.close()


def num_kept() -> float:
    return REGISTRY.get_sample_value("baton_worker_leases_kept_total") or 0.0


async def until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not done():  # noqa: ASYNC110 (a metric cannot be awaited)
            await asyncio.sleep(0.01)


async def num_leases(worker: Worker) -> int:
    """After all that the front has told the engine so far."""
    return (await worker.engine.calls.status()).load.num_leases


@pytest.mark.parametrize(
    ("connector", "how", "is_kept"),
    [
        ("nixl", "release", False),
        ("nixl", "half-close", True),
        ("nixl", "cancel", True),
        ("nixl", "break", True),
        ("shared_storage", "break", False),
    ],
)
async def test_only_a_decode_workers_word_ends_a_lease_on_memory_at_once(
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    connector: str,
    how: str,
    is_kept: bool,
) -> None:
    monkeypatch.setattr(prefill_service, "lease_grace_s", lambda _: FOREVER_S)
    before = num_kept()
    async with prefill_worker(tiny_dir, tmp_path, connector) as worker:
        line = Line(worker.address)
        async with grpc.aio.insecure_channel(await line.open()) as channel:
            call = await all_announced(channel)
            assert await num_leases(worker) == 1
            await end(how, call, line)
            await until(lambda: not worker.active)
            assert (await num_leases(worker), num_kept() - before) == (is_kept, is_kept)
            assert await drain(worker) == 0  # which does not wait for a lease that is only kept
        if how != "break":
            await line.close()
    kept = [record for record in caplog.records if "did not end the lease" in record.message]
    assert [record.__dict__["request_id"] for record in kept] == ["leased"] * is_kept


async def test_a_kept_lease_ends_by_itself(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_service, "lease_grace_s", lambda _: 0.2)
    before = num_kept()
    async with prefill_worker(tiny_dir, tmp_path, "nixl") as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            (await all_announced(channel)).cancel()
            await until(lambda: num_kept() > before)
            async with asyncio.timeout(120):
                while await num_leases(worker):  # noqa: ASYNC110 (the engine has to be asked)
                    await asyncio.sleep(0.01)
        status = await worker.engine.calls.status()
    assert status.integrity == "ok"
    assert status.load.num_free_blocks + status.load.num_cached_blocks == status.load.num_blocks


def test_the_grace_covers_whoever_may_still_read() -> None:
    """Both who notices late, and who notices nothing but gives each read up in time."""
    for transfer_timeout_s in (0.1, 10.0, 60.0):
        grace_s = lease_grace_s(WorkerSettings(transfer_timeout_s=transfer_timeout_s))
        assert grace_s > max(LOSS_NOTICED_S, transfer_timeout_s)


# ------------------------------------------------------------------------------------------- decode worker


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = ("--connector=nixl", "--engine-timeout=100", "--chunk-size=1")
    fleet = tiny_fleet(tmp_path_factory.mktemp("fleet"), *flags, prefill=1, decode=1)
    with running(fleet):
        yield fleet


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_decode_worker_gives_its_word_however_a_request_ends(fleet: Fleet, salt: Salt, how: str) -> None:
    """The prefill engine is stopped, so that the request ends while its prompt is being computed."""
    prefill, decode = fleet.members
    before = watch.worker_metrics(prefill)
    moved_before = watch.total(watch.worker_metrics(decode), "baton_worker_kv_blocks_moved_total")
    engine = watch.engine_pid(prefill)
    with Client(fleet.grpc, timeout=15.0 if how == "deadline" else CALL_TIMEOUT_S) as client:
        answer = client.generate(random_prompt(random.Random(3), 3500), max_tokens=5, cache_salt=salt())
        wait_for(
            "the first blocks are handed over",
            lambda: watch.total(watch.worker_metrics(decode), "baton_worker_kv_blocks_moved_total") > moved_before,
            CALL_TIMEOUT_S,
        )
        os.kill(engine, signal.SIGSTOP)
        try:
            if how == "cancel":
                answer.cancel()
            else:
                with pytest.raises(DeadlineError):
                    answer.result()
            wait_for(
                "the stream has ended", lambda: num_streams(watch.worker_metrics(prefill)) > num_streams(before), 60
            )
        finally:
            os.kill(engine, signal.SIGCONT)
    after = watch.worker_metrics(prefill)
    assert num_streams(after, code="OK") == num_streams(before, code="OK") + 1
    assert watch.total(after, "baton_worker_leases_kept_total") == 0


def num_streams(samples: watch.Samples, **labels: str) -> float:
    return watch.total(samples, "baton_worker_streams_total", service="prefill", **labels)
