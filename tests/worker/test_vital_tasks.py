"""What a worker stands on: calls of others don't end it, and its end is seen."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from tests.broken_grpc import breaks_when
from tests.support.fake_engine import NUM_BLOCKS
from tests.worker.conftest import StartWorker, decode_request
from tests.worker.words import ANSWER, GARBAGE, WAIT


async def test_cancelled_status_calls_leave_the_worker_alone(start_worker: StartWorker) -> None:
    worker = await start_worker()
    for _ in range(50):
        asked = [asyncio.ensure_future(worker.status()) for _ in range(20)]
        await asyncio.sleep(0)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    assert (await worker.status()).load.num_blocks == NUM_BLOCKS
    call = worker.decode.Decode(decode_request(ANSWER), timeout=20)
    assert [list(event.tokens) for event in [one async for one in call]]
    assert not worker.process.done()


async def test_status_calls_share_the_engines_answers(start_worker: StartWorker) -> None:
    worker = await start_worker()
    answers = await asyncio.gather(*(worker.status() for _ in range(200)))
    assert {answer.load.num_blocks for answer in answers} == {NUM_BLOCKS}


async def test_a_front_that_cannot_hear_its_engine_any_more_ends(
    start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Not after --engine-timeout, at which the engine would be blamed."""
    worker = await start_worker(engine_timeout=3600.0)
    waiting = worker.decode.Decode(decode_request(WAIT), timeout=60)
    reading = asyncio.ensure_future(waiting.read())
    with contextlib.suppress(grpc.aio.AioRpcError):
        await worker.decode.Decode(decode_request(GARBAGE), timeout=60).read()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await reading
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.wait_for(worker.process, 60) == 1
    assert any("a task ended that this process stands on" in record.message for record in caplog.records)


async def test_a_front_whose_port_serves_nobody_any_more_ends(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = asyncio.Event()
    breaks_when(broken, monkeypatch)
    worker = await start_worker()
    broken.set()
    assert await asyncio.wait_for(worker.process, 60) == 1
    assert any("a task ended that this process stands on" in record.message for record in caplog.records)
