"""What a router knows of its workers, as they come, change and go."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest

from common.batch_time import StepShape
from common.batch_time_file import encode
from common.errors import ModelNotFoundError
from common.grpc.transport import Channels
from common.types import LOAD_INTERVAL_S, WorkerRole, WorkerState, request_tag
from protos.baton.v1 import worker_pb2
from router.fleet.endpoint import Endpoint
from router.fleet.patience import PATIENCE, Patience
from router.fleet.registry import Registry
from router.fleet.track_record import MAX_FAILURES
from tests.router.conftest import StartWorker
from tests.router.test_costs import model
from tests.support.fake_worker import Context, FakeWorker


@pytest.fixture
def patience() -> Patience:
    return PATIENCE


@pytest.fixture
async def registry(worker: FakeWorker, patience: Patience) -> AsyncIterator[Registry]:
    registry = Registry([], [worker.address], patience=patience)
    registry.start()
    yield registry
    await registry.close()


async def until(registry: Registry, is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await registry.changed(0.05)


def endpoint(registry: Registry, address: str) -> Endpoint:
    return next(endpoint for endpoint in registry.endpoints() if endpoint.address == address)


async def test_a_worker_is_described(registry: Registry, worker: FakeWorker) -> None:
    before = endpoint(registry, worker.address)
    assert (before.state, before.epoch) == (WorkerState.UNREACHABLE, "")
    assert "unreachable" in registry.not_ready()
    await until(registry, lambda: not registry.not_ready())
    known = endpoint(registry, worker.address)
    assert (known.role, known.state, known.epoch, known.fingerprint) == (
        WorkerRole.DECODE,
        WorkerState.READY,
        "e1",
        "f1",
    )
    assert known.load.num_blocks == 100
    assert registry.served().limits.max_model_len == 256
    assert registry.served("tiny") is registry.served() is registry.models["tiny"]
    with pytest.raises(ModelNotFoundError, match=r"^model: 'Tiny' is not served here; this is 'tiny'"):
        registry.served("Tiny")


@pytest.mark.parametrize("patience", [Patience(model_s=0.1)])
async def test_what_a_worker_learns_of_its_steps_times_arrives(registry: Registry, worker: FakeWorker) -> None:
    await until(registry, lambda: not registry.not_ready())
    assert endpoint(registry, worker.address).batch_time is None

    def said(version: int, source: str) -> worker_pb2.BatchTime:
        return worker_pb2.BatchTime(model=encode(model(floor_s=version / 100)), source=source, version=version)

    def floor_s() -> float | None:
        time = endpoint(registry, worker.address).batch_time
        return None if time is None else time.seconds(StepShape())

    worker.change(batch_time=said(1, "quick"))
    worker.change(batch_time=said(2, "learned"))
    await until(registry, lambda: floor_s() == 0.02)
    worker.change(batch_time=said(3, "learned"))
    await until(registry, lambda: floor_s() == 0.03)
    worker.change(batch_time=said(4, "quick"))
    await until(registry, lambda: floor_s() is None)


class Restless(FakeWorker):
    """Each of its reports says that its model of time is a newer one."""

    num_asked = 0

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.WorkerInfo:  # noqa: N802
        self.num_asked += 1
        return await super().GetInfo(request, context)

    def _load(self) -> worker_pb2.WorkerLoad:
        load = super()._load()
        load.batch_time_version = self.num_asked + 1
        return load


async def test_a_worker_that_always_has_a_newer_model_is_asked_seldom() -> None:
    worker = Restless()
    registry = Registry([], [await worker.start()], patience=Patience(model_s=600.0))
    registry.start()
    try:
        for number in range(5):
            worker.change(num_requests_waiting=number)
            await until(registry, lambda: endpoint(registry, worker.address).load.num_requests_waiting == number)  # noqa: B023
        assert worker.num_asked == 1
    finally:
        await registry.close()
        await worker.stop()


async def test_the_kept_fleet_is_told_of_all_that_changes(registry: Registry, worker: FakeWorker) -> None:
    def kept() -> Endpoint:
        (one,) = registry.fleet().endpoints()
        (known,) = registry.endpoints()
        assert replace(one, suspended="") == replace(known, suspended="")
        assert bool(one.suspended) == bool(known.suspended)
        return one

    assert kept().state is WorkerState.UNREACHABLE
    await until(registry, lambda: kept().state is WorkerState.READY)
    with registry.sending({worker.address: 7}, num_context=70):
        told = kept()
        assert (told.num_unreported, told.num_unreported_tokens, told.num_unreported_context) == (1, 7, 70)
    assert kept().num_unreported == 0
    worker.change(num_requests_waiting=3)
    await until(registry, lambda: kept().load.num_requests_waiting == 3)
    who = kept().incarnation
    for _ in range(MAX_FAILURES):
        registry.track.failed(who, time.monotonic())
    assert kept().suspended
    registry.track.succeeded(who, time.monotonic())
    assert not kept().suspended
    registry.suspect(*who, "it is gone")
    assert kept().state is WorkerState.UNREACHABLE
    registry.set_addresses([worker.address], [worker.address])
    assert kept().role is WorkerRole.BOTH


async def test_sent_requests_count_until_they_are_reported(registry: Registry, worker: FakeWorker) -> None:
    await until(registry, lambda: not registry.not_ready())
    with registry.sending({worker.address: 7}):
        assert endpoint(registry, worker.address).num_unreported == 1
        await asyncio.sleep(2 * LOAD_INTERVAL_S)
        worker.change(num_requests_waiting=1)
        await until(registry, lambda: endpoint(registry, worker.address).num_unreported == 0)
    assert endpoint(registry, worker.address).num_unreported == 0


async def test_a_report_that_counts_a_request_ends_its_being_added(
    registry: Registry, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.worker.LOAD_INTERVAL_S", math.inf)  # however long ago they were sent
    await until(registry, lambda: not registry.not_ready())
    with registry.sending({worker.address: 7}, "r-1"), registry.sending({worker.address: 5}, "r-2"):
        load = {"num_requests_running": 1, "counted_requests": [request_tag("r-1"), request_tag("another router's")]}
        worker.change(load=load)
        await until(registry, lambda: endpoint(registry, worker.address).load.num_requests_running == 1)
        told = endpoint(registry, worker.address)
        assert (told.num_unreported, told.num_unreported_tokens) == (1, 5)


@pytest.mark.parametrize("patience", [Patience(silence_s=0.3)])
async def test_a_silent_worker_is_unreachable(registry: Registry, worker: FakeWorker) -> None:
    worker.change(report_s=0.02)
    await until(registry, lambda: not registry.not_ready())
    worker.silent = True
    await until(registry, lambda: endpoint(registry, worker.address).state is WorkerState.UNREACHABLE)
    worker.change(silent=False)
    await until(registry, lambda: not registry.not_ready())


async def test_a_restart_is_another_epoch(registry: Registry, worker: FakeWorker) -> None:
    await until(registry, lambda: not registry.not_ready())
    await worker.stop()
    await until(registry, lambda: endpoint(registry, worker.address).state is WorkerState.UNREACHABLE)
    worker.epoch = "e2"
    await worker.start(worker.address)
    await until(registry, lambda: not registry.not_ready())
    assert endpoint(registry, worker.address).epoch == "e2"


async def test_another_process_that_answers_on_the_same_stream_is_asked_who_it_is(
    registry: Registry, worker: FakeWorker
) -> None:
    """As behind a proxy, which keeps the router's connection while the worker behind it restarts."""
    await until(registry, lambda: not registry.not_ready())
    worker.change(epoch="e2", fingerprint="f2")
    await until(registry, lambda: endpoint(registry, worker.address).epoch == "e2")
    assert endpoint(registry, worker.address).fingerprint == "f2"


async def test_a_fleet_that_all_restarts_with_another_model_is_served(registry: Registry, worker: FakeWorker) -> None:
    await until(registry, lambda: not registry.not_ready())
    await worker.stop()
    await until(registry, lambda: bool(registry.not_ready()))
    worker.epoch, worker.model, worker.fingerprint = "e2", "newer", "f2"
    await worker.start(worker.address)
    await until(registry, lambda: not registry.not_ready())
    assert registry.served().limits.model == "newer"


async def test_addresses_come_and_go(registry: Registry, worker: FakeWorker, start_worker: StartWorker) -> None:
    await until(registry, lambda: not registry.not_ready())
    other = await start_worker(WorkerRole.BOTH)
    registry.set_addresses([other.address], [worker.address, other.address])
    await until(registry, lambda: endpoint(registry, other.address).state is WorkerState.READY)
    assert [e.role for e in registry.endpoints()] == [WorkerRole.DECODE, WorkerRole.BOTH]
    assert endpoint(registry, worker.address).state is WorkerState.READY, "a worker that stays is not interrupted"
    with registry.sending({worker.address: 7}):
        registry.set_addresses([other.address], [other.address])
        assert [e.address for e in registry.endpoints()] == [other.address]
    registry.set_addresses([], [])
    assert registry.not_ready() == "no decode worker is ready (none is configured)"


class Counted(Channels):
    """Knows which of its channels are open; as if the certificates had changed with each `rotate`."""

    def __init__(self) -> None:
        super().__init__()
        self.open_ones: list[str] = []
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def rotate(self) -> None:
        self._version += 1

    def open(self, address: str) -> grpc.aio.Channel:
        channel = super().open(address)
        self.open_ones.append(address)
        original = channel.close

        async def close(grace: float | None = None) -> None:
            self.open_ones.remove(address)
            await original(grace)

        channel.close = close  # type: ignore[method-assign]
        return channel


async def test_workers_that_come_and_go_leave_nothing(worker: FakeWorker) -> None:
    channels = Counted()
    registry = Registry([], [worker.address], channels)
    registry.start()
    try:
        await until(registry, lambda: not registry.not_ready())
        with registry.sending({worker.address: 7}):
            for number in range(20):
                others = [f"10.0.0.{number}:1"]
                registry.set_addresses(others, [worker.address])
                with registry.sending(dict.fromkeys(others, 0)):
                    assert f'address="10.0.0.{number}:1"' in generate_latest().decode()
            registry.set_addresses([], [worker.address])
            assert 'address="10.0.0.' not in generate_latest().decode()
            await until(registry, lambda: channels.open_ones == [worker.address])
            registry.set_addresses([], [])
            # Its request goes on: the channel stays open for it, and the metrics have it.
            await asyncio.sleep(0.05)
            assert channels.open_ones == [worker.address]
            assert f'address="{worker.address}"' in generate_latest().decode()
        assert f'address="{worker.address}"' not in generate_latest().decode()
        await until(registry, lambda: channels.open_ones == [])
    finally:
        await registry.close()
    assert channels.open_ones == []


async def test_rotated_certificates_leave_no_channels(worker: FakeWorker) -> None:
    channels = Counted()
    registry = Registry([], [worker.address], channels)
    registry.start()
    try:
        for epoch in range(5):
            await until(registry, lambda: not registry.not_ready())
            channels.rotate()
            await worker.stop()
            await until(registry, lambda: bool(registry.not_ready()))
            worker.epoch = f"after {epoch}"
            await worker.start(worker.address)
        await until(registry, lambda: not registry.not_ready())
        await until(registry, lambda: channels.open_ones == [worker.address])
    finally:
        await registry.close()
