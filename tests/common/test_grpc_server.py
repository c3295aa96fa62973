"""Calls of methods that a server does not have, whatever their names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.grpc_health import SERVING, Health
from common.grpc_options import MAX_MESSAGE_BYTES, worker_server_options
from common.grpc_server import UNKNOWN, make_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
NAMES = [b"/a\xdb/b", b"\xff", b"", b"/", b"/grpc.health.v1.Health/\xc3", b"/grpc.health.v1.Health/Nothing"]


class Watcher(grpc.aio.ServerInterceptor):
    """Of the names that interceptors see."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def intercept_service(self, continuation, handler_call_details):
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


def call_of(path: bytes) -> bytes:
    """The frames of a call without a message."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    fields[b"content-type"] = b"application/grpc"
    block = b"".join(b"\x00" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields.items())
    return len(block).to_bytes(3, "big") + b"\x01\x05\x00\x00\x00\x01" + block


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
