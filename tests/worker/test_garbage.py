"""A request that a worker refused is gone at once: nothing of it waits for the garbage collector."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import pytest

from protos.baton.v1 import prefill_pb2
from tests.garbage import left_of_requests, old_objects_are_left_out, only_collected
from tests.worker.conftest import RunningWorker, StartWorker, decode_request
from tests.worker.words import ANSWER, VOCAB_SIZE

__all__ = ["old_objects_are_left_out"]

WARM_UP = 5
NUM_ASKS = 3


async def decode(worker: RunningWorker) -> grpc.StatusCode:
    return await worker.decode.Decode(decode_request(VOCAB_SIZE), timeout=20).code()


async def prefill(worker: RunningWorker) -> grpc.StatusCode:
    call = worker.prefill.Prefill(timeout=20)
    start = prefill_pb2.PrefillStart(request_id="p", prompt_token_ids=[ANSWER] * 8, first_block=99)
    await call.write(prefill_pb2.PrefillRequest(start=start))
    return await call.code()


@pytest.mark.parametrize("ask", [decode, prefill])
async def test_nothing_of_a_refused_request_is_left(
    start_worker: StartWorker, ask: Callable[[RunningWorker], Awaitable[grpc.StatusCode]]
) -> None:
    worker = await start_worker()
    for _ in range(WARM_UP):
        assert await ask(worker) is grpc.StatusCode.INVALID_ARGUMENT
    with only_collected() as found:
        for _ in range(NUM_ASKS):
            await ask(worker)
    assert not left_of_requests(found)
