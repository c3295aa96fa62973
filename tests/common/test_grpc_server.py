"""Calls of methods that a server does not have, whatever their names."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.grpc.health import SERVING, Health
from common.grpc.options import MAX_MESSAGE_BYTES, MAX_PENDING_CALLS, client_server_options, worker_server_options
from common.grpc.server import UNKNOWN, make_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
NAMES = [b"/a\xdb/b", b"\xff", b"", b"/", b"/grpc.health.v1.Health/\xc3", b"/grpc.health.v1.Health/Nothing"]


class Watcher(grpc.aio.ServerInterceptor):
    """Of the names that interceptors see."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        self.seen.append(handler_call_details.method)
        return await continuation(handler_call_details)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
async def port(watcher: Watcher) -> AsyncIterator[int]:
    server = make_server(
        worker_server_options(max_message_bytes=MAX_MESSAGE_BYTES, max_streams=1024), [watcher], max_calls=10
    )
    health = Health()
    health.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


def call_of(path: bytes, stream: int = 1) -> bytes:
    """The frames of a call without a message."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    fields[b"content-type"] = b"application/grpc"
    block = b"".join(b"\x00" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields.items())
    return len(block).to_bytes(3, "big") + b"\x01\x05" + stream.to_bytes(4, "big") + block


@pytest.mark.parametrize("path", NAMES)
async def test_no_name_ends_the_server(port: int, path: bytes, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + call_of(path))
    await asyncio.wait_for(reader.read(9), 60)
    writer.write(b"\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678")  # a ping, answered after what came before
    got = b""
    while b"12345678" not in got:
        more = await asyncio.wait_for(reader.read(4096), 60)
        if not more:
            break  # refused, with the whole connection
        got += more
    writer.close()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status == SERVING
    assert not [record for record in caplog.records if record.exc_info]


async def test_unknown_methods_are_unimplemented_and_interceptors_see_them(port: int, watcher: Watcher) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for path in ("/no.Service/Method", "/grpc.health.v1.Health/Nothing"):
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert watcher.seen == [UNKNOWN, UNKNOWN]


async def test_calls_at_a_time_are_bounded(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watching = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(10)]
        for one in watching:
            assert await one.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.slow
async def test_calls_that_wait_for_a_busy_process_are_not_cancelled() -> None:
    """The loop stands still while some connections bring as many calls as they may; then others' calls come."""
    num_streams = 1000
    options = client_server_options(max_message_bytes=1 << 20, max_connections=64, max_streams=num_streams)
    server = make_server(options, max_calls=2 * MAX_PENDING_CALLS)
    health = Health()
    health.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    calls = b"".join(call_of(b"/grpc.health.v1.Health/Check", number) for number in range(1, 2 * num_streams, 2))
    codes: list[grpc.StatusCode] = []

    def ask() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = [stub.Check.future(health_pb2.HealthCheckRequest(), timeout=120) for _ in range(20)]
            all_sent.set()
            codes.extend(one.code() for one in asked)

    all_sent = threading.Event()
    quiet = threading.Thread(target=ask)
    with ExitStack() as opened:
        for _ in range(4):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            connection.sendall(PREFACE + calls)
        time.sleep(0.5)  # noqa: ASYNC251 - the loop stands still, while threads of gRPC take the calls in
        quiet.start()
        all_sent.wait(60)
        time.sleep(0.5)  # noqa: ASYNC251
        await asyncio.to_thread(quiet.join)
    await server.stop(None)
    assert codes == [grpc.StatusCode.OK] * 20
