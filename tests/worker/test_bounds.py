"""What one caller can make a worker hold is bounded, and others don't notice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.stack.stack_plan import free_ports
from common import metrics
from common.config import WorkerSettings
from common.grpc.status import DETAILS_KEY
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, worker_pb2, worker_pb2_grpc
from tests.support.calls import received
from tests.worker.conftest import RunningWorker, StartWorker, decode_request
from tests.worker.words import ANSWER, FLOOD, WAIT
from worker import engine_client, engine_stream
from worker.port import max_message_bytes

# gRPC takes 0.1 MB of what nobody reads. Otherwise it takes 6 MB, more than is left of an engine's flood if the worker
# writes as fast as its engine sends.
SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**16),
    ("grpc.use_local_subchannel_pool", 1),
]


async def refusal(worker: RunningWorker, word: int, num_tokens: int = 8) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await worker.decode.Decode(decode_request(word, num_tokens), timeout=20).read()
    return failed.value


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    status = status_pb2.Status.FromString(bytes(dict(error.trailing_metadata() or ())[DETAILS_KEY]))
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    seconds: float = info.retry_delay.ToTimedelta().total_seconds()
    return seconds


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
    while (refused := await answer_or_refusal(worker)) is not None:
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


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


async def test_of_a_split_prompt_only_the_part_waits(start_worker: StartWorker) -> None:
    worker = await start_worker(max_waiting_tokens=100)
    calls = []
    for number in range(2):
        call = worker.prefill.Prefill(timeout=60)
        start = prefill_pb2.PrefillStart(request_id=f"p{number}", prompt_token_ids=[WAIT] * 5000, stop_block=1)
        await call.write(prefill_pb2.PrefillRequest(start=start))
        assert (await received(call)).HasField("accepted")
        calls.append(call)
    for call in calls:
        call.cancel()


async def test_a_full_prefill_worker_refuses_too(start_worker: StartWorker) -> None:
    worker = await start_worker(max_waiting_requests=1)
    calls = []
    for number in range(2):
        call = worker.prefill.Prefill(timeout=60)
        start = prefill_pb2.PrefillStart(request_id=f"p{number}", prompt_token_ids=[WAIT] * 8)
        await call.write(prefill_pb2.PrefillRequest(start=start))
        calls.append(call)
        if number == 0:
            assert (await received(call)).HasField("accepted")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await calls[1].read()
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay_s(failed.value) > 0


async def test_what_a_caller_does_not_read_is_bounded_and_ends_its_request_alone(
    start_worker: StartWorker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_stream, "MAX_UNREAD_EVENTS", 64)
    worker = await start_worker()
    before = metrics.worker_streams_unread._value.get()
    async with grpc.aio.insecure_channel(worker.address, options=SMALL_WINDOW) as channel:
        slow = decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode_request(FLOOD), timeout=60)
        while metrics.worker_streams_unread._value.get() == before:
            assert await answer_or_refusal(worker) is None  # a caller beside it is served
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await read_all(slow)
    assert failed.value.code() is grpc.StatusCode.ABORTED
    assert f"{engine_stream.MAX_UNREAD_EVENTS} events" in (failed.value.details() or "")
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


async def test_messages_are_no_longer_than_the_context_needs(start_worker: StartWorker) -> None:
    worker = await start_worker(max_model_len=1000)
    largest = decode_request(ANSWER, 200_000)  # too many tokens, and few enough bytes to be told so
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await worker.decode.Decode(largest, timeout=20).read()
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await worker.decode.Decode(decode_request(ANSWER, 300_000), timeout=20).read()
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_largest_message_follows_the_model(tmp_path: Path) -> None:
    def largest(**settings: object) -> int:
        return max_message_bytes(WorkerSettings.model_validate(settings), tmp_path)

    unknown = largest()
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    assert largest(max_model_len=100) < largest() < unknown
    for text in ('{"max_position_embeddings": "many"}', '{"max_position_embeddings": -1}', "[]", "no JSON"):
        (tmp_path / "config.json").write_text(text)
        assert largest() == unknown


async def test_a_call_without_its_message_ends(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.receiving.RECEIVE_TIMEOUT_S", 0.1)
    worker = await start_worker()
    channel: Any = worker.channel  # a stream of messages that never come
    call = channel.stream_stream("/baton.v1.DecodeService/Decode")()
    with pytest.raises(grpc.aio.AioRpcError, match="did not come within"):
        await asyncio.wait_for(call.read(), 60)
    call = channel.stream_stream("/baton.v1.DecodeService/Decode")()
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError, match="is missing"):
        await asyncio.wait_for(call.read(), 60)


async def test_calls_at_a_time_are_bounded(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.port.OTHER_CALLS", 2)
    worker = await start_worker(max_waiting_requests=1, max_num_seqs=1)  # four in one connection, eight in all
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        watching = []
        for _ in range(2):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(worker.address, options=options))
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            for _ in range(4):
                watching.append(stub.WatchLoad(worker_pb2.WatchLoadRequest()))
                assert await watching[-1].read()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await worker.status()
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watching[0].cancel()
        assert await eventually_answers(worker)


async def test_many_who_watch_the_load_take_turns(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def changes_all_the_time(_client: object, _timeout_s: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(engine_client.EngineClient, "load_change", changes_all_the_time)
    monkeypatch.setattr("worker.worker_service.NUM_PROMPT_WATCHERS", 4)
    monkeypatch.setattr("worker.worker_service.MAX_REPORTS_PER_S", 20)
    worker = await start_worker()
    numbers = [0] * 10

    async def count(index: int) -> None:
        call = worker.worker.WatchLoad(worker_pb2.WatchLoadRequest())
        while isinstance(await call.read(), worker_pb2.WorkerLoad):
            numbers[index] += 1

    watching = [asyncio.create_task(count(index)) for index in range(len(numbers))]
    async with asyncio.timeout(60):
        while min(numbers) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        begin, before = time.monotonic(), sum(numbers)
        while min(numbers) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    allowed = 20 * (time.monotonic() - begin) + len(numbers)
    assert sum(numbers) - before <= allowed
    for task in watching:
        task.cancel()


async def eventually_answers(worker: RunningWorker) -> bool:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return bool(await worker.status())


async def test_large_headers_are_refused(start_worker: StartWorker) -> None:
    worker = await start_worker()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await worker.worker.GetInfo(worker_pb2.GetInfoRequest(), metadata=[("x-large", "x" * 20_000)])
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await worker.status()


@pytest.mark.parametrize("of_probes", [False, True])
async def test_health_answers_all_that_it_may_be_asked(
    start_worker: StartWorker, caplog: pytest.LogCaptureFixture, of_probes: bool
) -> None:
    (port,) = free_ports(1)
    worker = await start_worker(health_listen=f"127.0.0.1:{port}")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}" if of_probes else worker.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == serving
        assert (await health.List(health_pb2.HealthListRequest())).statuses["baton.v1.DecodeService"].status == serving
        assert (await health.Watch(health_pb2.HealthCheckRequest()).read()).status == serving
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        raw: Any = channel
        for method in ("Check", "Watch"):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await raw.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\x0a\xff").read()
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


async def test_pings_are_bounded_by_strikes(start_worker: StartWorker) -> None:
    worker = await start_worker()
    host, _, port = worker.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + ping * 50)
    assert b"too_many_pings" in await asyncio.wait_for(reader.read(), 60)  # to the end of the connection
    writer.close()
    assert await worker.status()
