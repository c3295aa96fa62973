"""What the autoscaler knows of workers beside their load."""

from __future__ import annotations

import asyncio

import pytest

from common.batch_time_file import encode
from common.types import WorkerRole
from protos.baton.v1 import worker_pb2
from router.autoscaler.fleet_load import CHUNK, FleetLoad
from router.fleet.discovery.sources import discover
from router.fleet.patience import Patience
from tests.router.test_costs import model
from tests.support.fake_worker import FakeWorker


async def test_a_worker_s_rate_is_what_its_model_of_time_says() -> None:
    worker = FakeWorker(WorkerRole.PREFILL)
    await worker.start()
    fleet = FleetLoad(
        discover((worker.address,), key="prefill"),
        discover((), key="decode"),
        discover((), key="routers"),
        arrival_window_s=10,
        patience=Patience(model_s=0.1),
    )
    fleet.start()

    async def until_rate(wanted: object) -> None:
        async with asyncio.timeout(20):
            while True:
                signals = fleet.signals()
                if signals and signals.prefill.num_ready and signals.prefill.predicted_rate == wanted:
                    return
                await asyncio.sleep(0.01)

    try:
        await until_rate(None)
        for version, floor_s in ((1, 0.1), (2, 0.3)):
            worker.change(
                batch_time=worker_pb2.BatchTime(model=encode(model(floor_s=floor_s)), source="file", version=version)
            )
            await until_rate(pytest.approx(CHUNK / (floor_s + CHUNK * 0.001)))
            signals = fleet.signals()
            assert signals
            (time,) = signals.prefill.times
            # A prompt of two chunks and a half: each step has the floor.
            assert time.prompt_s(2.5 * CHUNK) == pytest.approx(3 * floor_s + 2.5 * CHUNK * 0.001)
            assert time.decode_s(8, 1000) == pytest.approx(floor_s + 8 * 0.001)
        worker.change(batch_time=worker_pb2.BatchTime(source="none", version=3))
        await until_rate(None)
        signals = fleet.signals()
        assert signals
        assert signals.prefill.times == ()
    finally:
        await fleet.close()
        await worker.stop()


async def test_only_ready_workers_of_one_role_are_counted_as_such() -> None:
    """Neither one that drains, nor one that is listed and never reports, nor one of both roles."""
    roles = (WorkerRole.BOTH, WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE)
    workers = [FakeWorker(role) for role in roles]
    for worker in workers:
        await worker.start()
    both, prefill, decode, drains = workers
    drains.change(state=worker_pb2.WORKER_STATE_DRAINING)
    fleet = FleetLoad(
        discover((both.address, prefill.address), key="prefill"),
        discover((both.address, decode.address, drains.address, "127.0.0.1:1"), key="decode"),
        discover((), key="routers"),
        arrival_window_s=10,
    )
    fleet.start()
    try:
        async with asyncio.timeout(20):
            while True:
                signals = fleet.signals()
                if signals and (signals.prefill.num_ready, signals.decode.num_silent) == (2, 1):
                    break
                await asyncio.sleep(0.01)
        assert (signals.prefill.num_fixed, signals.decode.num_fixed) == (1, 1)
    finally:
        await fleet.close()
        for worker in workers:
            await worker.stop()
