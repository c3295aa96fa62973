"""What a router knows of its workers' blocks, through real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common.block_hash import block_hashes, root_hash
from common.grpc.transport import Channels
from protos.baton.v1 import worker_pb2_grpc
from router.fleet.block_watch import BlockWatch
from router.fleet.patience import Patience
from router.fleet.registry import Registry
from tests.router.conftest import StartWorker, sample
from tests.support.fake_worker import FakeWorker

QUICK = Patience(block_retry_s=0.01)
NAMES = block_hashes(root_hash("f1"), list(range(64)), 16)


async def becomes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (an index cannot be awaited)
            await asyncio.sleep(0.005)


async def test_a_list_and_changes(worker: FakeWorker) -> None:
    worker.block_changes = [
        {"sequence": 7, "starts_list": True, "stored": NAMES[0]},
        {"sequence": 7, "stored": NAMES[1]},
        {"sequence": 8, "stored": b"".join(NAMES[2:])},
    ]
    registry = Registry([], [worker.address], patience=QUICK)
    registry.start()
    index = registry.blocks.index
    await becomes(lambda: index.match(NAMES, 0) == {worker.address: 4})
    worker.more_blocks.put_nowait({"sequence": 9, "removed": NAMES[3]})
    await becomes(lambda: index.match(NAMES, 0) == {worker.address: 3})
    await worker.stop()
    await becomes(lambda: index.match(NAMES, 0) == {} and len(index) == 0)
    worker.epoch = "e2"
    worker.block_changes = [{"starts_list": True, "stored": NAMES[0]}]
    await worker.start(worker.address)
    await becomes(lambda: index.match(NAMES, 0) == {worker.address: 1})
    await registry.close()


async def test_a_gap_is_noticed_and_all_asked_for_anew(worker: FakeWorker) -> None:
    before = sample("baton_router_block_resyncs_total")
    worker.block_changes = [{"sequence": 1, "starts_list": True, "stored": NAMES[0]}]
    registry = Registry([], [worker.address], patience=QUICK)
    registry.start()
    index = registry.blocks.index
    await becomes(lambda: index.num_blocks(worker.address) == 1)
    worker.block_changes = [{"sequence": 3, "starts_list": True, "stored": b"".join(NAMES)}]
    worker.more_blocks.put_nowait({"sequence": 3, "stored": NAMES[2]})
    await becomes(lambda: index.match(NAMES, 0) == {worker.address: 4})
    assert worker.num_block_streams == 2
    assert sample("baton_router_block_resyncs_total") == before + 1
    await registry.close()


async def test_a_false_worker_is_not_followed(start_worker: StartWorker) -> None:
    false, true = await start_worker(), await start_worker()
    false.block_changes = [{"starts_list": True, "stored": b"".join(NAMES)}, {"stored": b"short"}]
    true.block_changes = [{"starts_list": True, "stored": NAMES[0]}]
    before = sample("baton_router_false_workers_total", about="blocks")
    registry = Registry([], [false.address, true.address], patience=QUICK)
    registry.start()
    await becomes(lambda: sample("baton_router_false_workers_total", about="blocks") == before + 1)
    await becomes(lambda: registry.blocks.index.match(NAMES, 0) == {true.address: 1})
    assert not registry.not_ready() or registry.model is None, "it still serves"
    await registry.close()


async def test_a_worker_of_an_older_version_is_used_without(
    worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.is_older = True
    channel = Channels().open(worker.address)
    watch = BlockWatch(QUICK)
    async with asyncio.timeout(20):
        with caplog.at_level("INFO"):
            await watch.follow(worker.address, "e1", worker_pb2_grpc.WorkerServiceStub(channel))
    assert "a worker tells of no blocks" in caplog.text
    await channel.close()
