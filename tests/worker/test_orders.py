"""What operators order of a worker, over its port."""

from __future__ import annotations

import logging

import grpc
import pytest

from common.errors import AbortedError, BatonError, IncompatibleError, InvalidArgumentError
from common.grpc.status import error_of_call
from protos.baton.v1 import worker_pb2
from tests.support.fake_engine import Script, answer_to
from tests.worker.fronts import Front, read, request_of, until

PROMPT = list(range(40))


def error_of(caught: grpc.aio.AioRpcError) -> BatonError:
    return error_of_call(caught.code().name, caught.details() or "", caught.trailing_metadata())


async def test_a_paused_worker_takes_nothing_new_and_goes_on_with_what_it_has(decode: Front) -> None:
    call = decode.decode.Decode(request_of(PROMPT, script=Script(on_status=True)))
    await until(lambda: decode.told("AddRequest"), "the engine has it")
    await decode.load()  # which lets a token come
    await read(call, num_tokens=1)
    for _ in range(2):  # again changes nothing
        assert (await decode.worker.Pause(worker_pb2.PauseWorkerRequest())).num_streams == 1
    assert (await decode.load()).state == worker_pb2.WORKER_STATE_PAUSED
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(decode.decode.Decode(request_of(PROMPT, request_id="late")))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "is paused" in (refused.value.details() or "")
    for _ in range(4):
        await decode.load()
    assert (await read(call)).token_ids == answer_to(PROMPT, 5)[1:]
    await decode.worker.Resume(worker_pb2.ResumeWorkerRequest())
    assert (await decode.load()).state == worker_pb2.WORKER_STATE_READY
    assert (await read(decode.decode.Decode(request_of(PROMPT)))).token_ids == answer_to(PROMPT, 5)


async def test_a_drain_cannot_be_taken_back(decode: Front) -> None:
    call = decode.decode.Decode(request_of(PROMPT, script=Script(stall_at=2)))
    await read(call, num_tokens=2)
    await decode.drain(30)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await decode.worker.Resume(worker_pb2.ResumeWorkerRequest())
    assert isinstance(error_of(refused.value), IncompatibleError)
    call.cancel()
    assert await decode.task == 0


async def test_a_request_is_aborted(decode: Front) -> None:
    """By its id, and no other one."""
    call = decode.decode.Decode(request_of(PROMPT, script=Script(stall_at=2), request_id="bad"))
    other = decode.decode.Decode(request_of(PROMPT, script=Script(stall_at=2, name="other"), request_id="good"))
    for one in (call, other):
        await read(one, num_tokens=2)
    assert (await decode.worker.Abort(worker_pb2.AbortWorkRequest(request_id="ba"))).num_streams == 0
    assert (await decode.worker.Abort(worker_pb2.AbortWorkRequest(request_id="bad"))).num_streams == 1
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await read(call)
    assert isinstance(error_of(ended.value), AbortedError)
    await until(lambda: decode.told("Release"), "the engine forgets it")
    assert len(decode.told("Release")) == 1
    other.cancel()
    await decode.settled()


async def test_flush_and_log_level_reach_the_engine(decode: Front) -> None:
    await decode.worker.FlushCache(worker_pb2.FlushWorkerCacheRequest())
    assert [one["action"] for one in decode.told("HintCache")] == ["flush"]
    before = logging.getLogger().level
    try:
        await decode.worker.SetLogLevel(worker_pb2.SetWorkerLogLevelRequest(level="debug"))
        assert logging.getLogger().level == logging.DEBUG
    finally:
        logging.getLogger().setLevel(before)
    await until(lambda: decode.told("OrderLevel"), "the engine is told")
    assert decode.told("OrderLevel")[0]["level"] == "debug"


async def test_errors_name_the_field(decode: Front) -> None:
    for call, field in (
        (decode.worker.SetLogLevel(worker_pb2.SetWorkerLogLevelRequest(level="loud")), "level"),
        (decode.worker.Abort(worker_pb2.AbortWorkRequest()), "request_id"),
        (decode.worker.Abort(worker_pb2.AbortWorkRequest(request_id="x\n")), "request_id"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        error = error_of(refused.value)
        assert (type(error), error.field) == (InvalidArgumentError, field)
