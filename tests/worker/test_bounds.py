"""What one caller can make a worker hold is bounded, and others don't notice."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from common import metrics
from protos.baton.v1 import decode_pb2, prefill_pb2, worker_pb2
from protos.status import DETAILS_KEY
from tests.worker.conftest import RunningWorker, StartWorker, decode_request
from tests.worker.words import ANSWER, FLOOD, WAIT
from worker import engine_client


async def refusal(worker: RunningWorker, word: int, num_tokens: int = 8) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await worker.decode.Decode(decode_request(word, num_tokens), timeout=20).read()
    return failed.value


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    status = status_pb2.Status.FromString(bytes(dict(error.trailing_metadata() or ())[DETAILS_KEY]))
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    return info.retry_delay.ToTimedelta().total_seconds()


async def wait_until_seen(worker: RunningWorker) -> None:
    """Until the front has taken in what was sent before: gRPC keeps the order of one connection's calls."""
    await worker.worker.GetInfo(worker_pb2.GetInfoRequest())


async def test_further_requests_are_refused_with_a_delay_while_too_many_wait(start_worker: StartWorker) -> None:
    worker = await start_worker(max_waiting_requests=3)
    before = metrics.worker_requests_refused._value.get()
    waiting = [worker.decode.Decode(decode_request(WAIT), timeout=60) for _ in range(3)]
    await wait_until_seen(worker)
    error = await refusal(worker, ANSWER)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-waiting-requests" in (error.details() or "")
    assert retry_delay_s(error) > 0
    assert metrics.worker_requests_refused._value.get() == before + 1
    waiting[0].cancel()
    while (error := await answer_or_refusal(worker)) is not None:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def read_all(call: grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeEvent]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def answer_or_refusal(worker: RunningWorker) -> grpc.aio.AioRpcError | None:
    try:
        await worker.decode.Decode(decode_request(ANSWER), timeout=20).read()
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def test_waiting_tokens_are_bounded_but_one_prompt_may_always_wait(start_worker: StartWorker) -> None:
    worker = await start_worker(max_waiting_tokens=100)
    long = worker.decode.Decode(decode_request(WAIT, 5000), timeout=60)
    await wait_until_seen(worker)
    error = await refusal(worker, ANSWER)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-waiting-tokens" in (error.details() or "")
    long.cancel()
    while await answer_or_refusal(worker) is not None:
        pass


async def test_a_full_prefill_worker_refuses_too(start_worker: StartWorker) -> None:
    worker = await start_worker(max_waiting_requests=1)
    calls = []
    for number in range(2):
        call = worker.prefill.Prefill(timeout=60)
        start = prefill_pb2.PrefillStart(request_id=f"p{number}", prompt_token_ids=[WAIT] * 8)
        await call.write(prefill_pb2.PrefillRequest(start=start))
        calls.append(call)
        if number == 0:
            assert (await call.read()).HasField("accepted")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await calls[1].read()
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay_s(failed.value) > 0


async def test_what_a_caller_does_not_read_is_bounded_and_ends_its_request_alone(
    start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await start_worker()
    before = metrics.worker_streams_unread._value.get()
    slow = worker.decode.Decode(decode_request(FLOOD), timeout=120)
    assert await slow.read()
    while metrics.worker_streams_unread._value.get() == before:
        assert await answer_or_refusal(worker) is None  # a caller beside it is served
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await read_all(slow)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{engine_client.MAX_UNREAD_EVENTS} events" in (failed.value.details() or "")
    assert any("does not read its stream" in record.message for record in caplog.records)
    assert "Release" in (await worker.status()).integrity


async def test_no_request_takes_longer_than_the_worker_allows(start_worker: StartWorker) -> None:
    worker = await start_worker(max_request_time=0.2)
    call = worker.decode.Decode(decode_request(WAIT))  # its caller sets no deadline
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await asyncio.wait_for(call.read(), 60)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "--max-request-time" in (failed.value.details() or "")


async def test_a_prefill_stream_without_a_first_message_ends(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_service.servicer.LOSS_NOTICED_S", 0.1)
    worker = await start_worker()
    call = worker.prefill.Prefill()
    with pytest.raises(grpc.aio.AioRpcError, match="did not come within"):
        await asyncio.wait_for(call.read(), 60)
