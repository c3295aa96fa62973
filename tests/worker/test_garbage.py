"""A request that is over, or refused, is gone at once: nothing of it waits for the garbage collector."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import pytest

from protos.baton.v1 import prefill_pb2
from tests.cyclic_garbage import left_of_requests, old_objects_are_left_out, only_collected
from tests.support.fake_engine import Script, answer_to
from tests.support.fake_prefill_worker import FakePrefillWorker, prefill_workers
from tests.worker.conftest import RunningWorker, StartWorker, decode_request
from tests.worker.fronts import Front, read, request_of
from tests.worker.test_many_calls import Stream
from tests.worker.words import ANSWER, VOCAB_SIZE

__all__ = ["old_objects_are_left_out"]

WARM_UP = 5
NUM_ASKS = 3
PROMPT = list(range(80, 94))
SLOW = Script(token_s=0.05)


async def decode_of(worker: RunningWorker) -> grpc.StatusCode:
    return await worker.decode.Decode(decode_request(VOCAB_SIZE), timeout=20).code()


async def prefill_of(worker: RunningWorker) -> grpc.StatusCode:
    call = worker.prefill.Prefill(timeout=20)
    start = prefill_pb2.PrefillStart(request_id="p", prompt_token_ids=[ANSWER] * 8, first_block=99)
    await call.write(prefill_pb2.PrefillRequest(start=start))
    return await call.code()


@pytest.mark.parametrize("ask", [decode_of, prefill_of])
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


async def answered_alone(decode: Front, prefill: Front) -> None:
    told = await read(decode.decode.Decode(request_of(PROMPT, [prefill])))
    assert told.token_ids == answer_to(PROMPT, 5)
    assert told.report.prefill_worker == prefill.address


async def answered_among_others(decode: Front, prefill: Front) -> None:
    stream = Stream(decode.decode)
    await stream.start(1, request_of(PROMPT, [prefill]))
    assert (await stream.ended(1)).token_ids == answer_to(PROMPT, 5)
    await stream.rpc.done_writing()


async def cancelled(decode: Front, prefill: Front) -> None:
    stream = Stream(decode.decode)
    await stream.start(1, request_of(PROMPT, [prefill], SLOW))
    await stream.has_tokens(1, 2)
    await stream.cancel(1)
    await stream.rpc.done_writing()


async def too_late(decode: Front, prefill: Front) -> None:
    stream = Stream(decode.decode)
    await stream.start(1, request_of(PROMPT, [prefill], SLOW), timeout_s=0.1)
    assert (await stream.ended(1)).end
    await stream.rpc.done_writing()


async def failed_before(decode: Front, prefill: Front) -> None:
    async with prefill_workers(FakePrefillWorker()) as (failing,):
        failing.fails()
        told = await read(decode.decode.Decode(request_of(PROMPT, [failing, prefill])))
    assert (told.report.num_retries, told.report.prefill_worker) == (1, prefill.address)


async def unreachable_before(decode: Front, prefill: Front) -> None:
    request = request_of(PROMPT, [prefill])
    request.prefill_addresses.insert(0, "127.0.0.1:1")
    told = await read(decode.decode.Decode(request))
    assert (told.report.num_retries, told.report.prefill_worker) == (1, prefill.address)


async def broke_a_rule(decode: Front, prefill: Front) -> None:
    async with prefill_workers(FakePrefillWorker()) as (lying,):
        lying.gives(99)
        told = await read(decode.decode.Decode(request_of(PROMPT, [lying, prefill])))
    assert (told.report.num_retries, told.report.prefill_worker) == (1, prefill.address)


@pytest.mark.parametrize(
    "ask",
    [answered_alone, answered_among_others, cancelled, too_late, failed_before, unreachable_before, broke_a_rule],
)
async def test_nothing_of_a_request_is_left(
    decode: Front, prefill: Front, ask: Callable[[Front, Front], Awaitable[None]]
) -> None:
    async def ask_and_settle() -> None:
        await ask(decode, prefill)
        await decode.settled()
        await prefill.settled()

    for _ in range(WARM_UP):
        await ask_and_settle()
    with only_collected() as found:
        for _ in range(NUM_ASKS):
            await ask_and_settle()
    assert not left_of_requests(found)
