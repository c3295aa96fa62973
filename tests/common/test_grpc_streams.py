"""Streams of responses are read so that gRPC keeps nothing: no read is cancelled, and a call that ends may end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest

from common.grpc.streams import MAX_AHEAD, MAX_AHEAD_BYTES, MessageStream, uncancelled
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2

Call = grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeEvent]
STOP = types_pb2.FINISH_REASON_STOP


class Server(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self) -> None:
        self.has_sent = asyncio.Event()
        """Set once it waits after its messages. A call that is cancelled before, while gRPC still writes one of them,
        ends at its `yield`, and sees no `CancelledError`."""
        self.may_end = asyncio.Event()
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def Decode(  # noqa: N802
        self,
        request: decode_pb2.DecodeRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        try:
            yield decode_pb2.DecodeEvent()
            yield decode_pb2.DecodeEvent(finish_reason=STOP if request.request_id == "ends" else 0)  # type: ignore[arg-type]
            self.has_sent.set()
            await self.may_end.wait()
            self.ended.put_nowait("by itself")
        except asyncio.CancelledError:
            self.ended.put_nowait("cancelled")
            raise

    async def DecodeMany(  # noqa: N802
        self,
        request_iterator: AsyncIterator[decode_pb2.DecodeManyRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[decode_pb2.DecodeManyResponse]:
        await context.send_initial_metadata(())
        for _ in range(3):
            yield decode_pb2.DecodeManyResponse(call_ids=[1], token_ids=[1])
        self.ended.put_nowait("by itself")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server, servicer = grpc.aio.server(), Server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")  # type: ignore[attr-defined]
    await server.start()
    yield servicer
    await server.stop(None)


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[decode_pb2_grpc.DecodeServiceAsyncStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:  # type: ignore[attr-defined]
        yield decode_pb2_grpc.DecodeServiceStub(channel)


def is_last(event: decode_pb2.DecodeEvent) -> bool:
    return event.finish_reason == STOP


async def test_each_message_until_the_end(server: Server, stub: decode_pb2_grpc.DecodeServiceAsyncStub) -> None:
    server.may_end.set()
    call = stub.Decode(decode_pb2.DecodeRequest(request_id="ends"))
    assert len([event async for event in MessageStream(call, decode_pb2.DecodeEvent, is_last)]) == 2
    assert await call.code() is grpc.StatusCode.OK


async def test_a_failed_call_raises(server: Server, stub: decode_pb2_grpc.DecodeServiceAsyncStub) -> None:
    call = stub.Decode(decode_pb2.DecodeRequest(), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError):
        [event async for event in MessageStream(call, decode_pb2.DecodeEvent)]


async def test_after_its_last_message_a_call_may_end(
    server: Server, stub: decode_pb2_grpc.DecodeServiceAsyncStub
) -> None:
    call = stub.Decode(decode_pb2.DecodeRequest(request_id="ends"))
    async with aclosing(MessageStream(call, decode_pb2.DecodeEvent, is_last)) as received:
        async for event in received:
            if is_last(event):
                break
    server.may_end.set()
    assert await asyncio.wait_for(server.ended.get(), 20) == "by itself"
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("request_id", ["ends", "goes on"])
async def test_a_call_that_does_not_end_is_cancelled(
    server: Server, stub: decode_pb2_grpc.DecodeServiceAsyncStub, request_id: str
) -> None:
    call = stub.Decode(decode_pb2.DecodeRequest(request_id=request_id))
    async with aclosing(MessageStream(call, decode_pb2.DecodeEvent, is_last)) as received:
        await anext(received)
        await anext(received)
        await asyncio.wait_for(server.has_sent.wait(), 20)
    assert await asyncio.wait_for(server.ended.get(), 20) == "cancelled"


async def test_a_reader_that_is_cancelled_cancels_no_read(
    server: Server, stub: decode_pb2_grpc.DecodeServiceAsyncStub
) -> None:
    """The read that has begun ends by itself, as its call is cancelled."""
    call = stub.Decode(decode_pb2.DecodeRequest())
    reads: list[asyncio.Task[object] | None] = []
    original = call.read

    async def read() -> object:
        reads.append(asyncio.current_task())
        return await original()

    call.read = read  # type: ignore[method-assign]

    async def reading() -> None:
        async with aclosing(MessageStream(call, decode_pb2.DecodeEvent)) as received:
            async for _ in received:
                pass

    task = asyncio.create_task(reading())
    async with asyncio.timeout(20):
        while len(reads) < 3:  # noqa: ASYNC110 (the third waits for a message that never comes)
            await asyncio.sleep(0.005)
        await server.has_sent.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    last = reads[-1]
    assert last is not None
    assert last.cancelling() == 0, "nobody asked it to end"
    assert await asyncio.wait_for(server.ended.get(), 20) == "cancelled"
    await asyncio.wait({last}, timeout=20)
    assert last.done()


async def test_what_goes_on_alone_may_fail() -> None:
    go = asyncio.Event()

    async def fail() -> None:
        await go.wait()
        raise ValueError("nobody waits for this")  # were it not looked at, pytest would see it as unhandled

    waiting = asyncio.create_task(uncancelled(fail()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    go.set()
    await asyncio.sleep(0)
    assert waiting.cancelled()


class FakeCall:
    """MessageStream that are there at once; counts what was read."""

    def __init__(self, num: int, *, size: int = 0, failure: Exception | None = None) -> None:
        self._left = num
        self._message = decode_pb2.DecodeEvent(report=types_pb2.RequestReport(fallback_reason="x" * size))
        self._failure = failure
        self._is_cancelled = False
        self.num_read = 0

    async def read(self) -> object:
        await asyncio.sleep(0)
        if self._left == 0 or self._is_cancelled:
            if self._failure is not None:
                raise self._failure
            return grpc.aio.EOF
        self._left -= 1
        self.num_read += 1
        return self._message

    def cancel(self) -> bool:
        self._is_cancelled = True
        return True

    def done(self) -> bool:
        return self._is_cancelled

    async def code(self) -> object:
        raise AssertionError("nobody asks")

    def add_done_callback(self, callback: object) -> None:
        raise AssertionError("the call has ended")


async def turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("size", "most"), [(0, MAX_AHEAD), (MAX_AHEAD_BYTES // 3, 3), (2 * MAX_AHEAD_BYTES, 1)])
async def test_a_slow_taker_has_few_messages_read_ahead(size: int, most: int) -> None:
    call = FakeCall(10_000, size=size)
    async with aclosing(MessageStream(call, decode_pb2.DecodeEvent)) as received:
        waiting = []
        for taken in range(1, 50):
            await anext(received)
            await turns(100)
            waiting.append(call.num_read - taken)
        assert max(waiting) == most
    num_read = call.num_read
    await turns(100)
    assert call.num_read == num_read, "nothing is read any more for who has left"


async def test_a_message_that_has_come_is_taken_at_once() -> None:
    async with aclosing(MessageStream(FakeCall(MAX_AHEAD), decode_pb2.DecodeEvent)) as received:
        await turns(100)
        for _ in range(MAX_AHEAD):
            with pytest.raises(StopIteration):  # it does not wait
                received.__anext__().send(None)
        assert [message async for message in received] == []


async def test_a_failure_comes_after_the_messages_before_it() -> None:
    got: list[decode_pb2.DecodeEvent] = []

    async def take() -> None:
        async for message in MessageStream(FakeCall(40, failure=ValueError("broken")), decode_pb2.DecodeEvent):
            got.append(message)
            await turns(10)

    with pytest.raises(ValueError, match="broken"):
        await take()
    assert len(got) == 40


def num_open_calls() -> int:
    """Of this event loop's clients: gRPC waits for the status of each."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return names.count("_AioCall._handle_status_once_received")


async def test_a_call_that_its_peer_ended_before_it_took_our_message_is_not_kept(
    server: Server, stub: decode_pb2_grpc.DecodeServiceAsyncStub
) -> None:
    call = stub.DecodeMany()
    await call.initial_metadata()
    assert num_open_calls() == 1, "grpcio has another name for what waits"
    assert await server.ended.get() == "by itself"

    async def write_until_the_status_is_here() -> None:  # it is behind messages that were not read
        for _ in range(1000):
            await call.write(decode_pb2.DecodeManyRequest())
            await asyncio.sleep(0.01)

    with pytest.raises(grpc.aio.AioRpcError):
        await write_until_the_status_is_here()
    stream = MessageStream(call, decode_pb2.DecodeManyResponse)
    with pytest.raises(grpc.aio.AioRpcError):
        await anext(stream)
    assert num_open_calls() == 1, "what is guarded against does not happen any more"
    await stream.aclose()
    for _ in range(1000):
        if not num_open_calls():
            break
        await asyncio.sleep(0.01)
    assert num_open_calls() == 0
