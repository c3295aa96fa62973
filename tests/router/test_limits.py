"""A router's limits, over real sockets: what is too much, too large or too slow is refused, and the rest goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.grpc.status import error_of_call
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from router.api.rest.entrance import LimitMiddleware
from router.limits.gate import Gate
from tests.router.conftest import RunningRouter, StartRouter, reaches, sample
from tests.router.processes.running import running
from tests.support.fake_worker import ANSWER, FakeWorker

MIB = 2**20
KEY = "k" * 32
OTHER = "o" * 32
ASK = inference_pb2.GenerateRequest(prompt="x")
BODY = {"prompt": "x", "max_tokens": 99}
NO_FIELD = {"param": None, "code": None}


def address_of(router: RunningRouter) -> tuple[str, int]:
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def error_in(answer: bytes, status: int) -> dict[str, object]:
    """What an answer that ends its connection says in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert first.startswith(f"http/1.1 {status} ")
    assert (headers["content-type"], headers["connection"]) == ("application/json", "close")
    assert int(headers["content-length"]) == len(body)
    said: dict[str, object] = json.loads(body)["error"]
    return said


async def generate(router: RunningRouter, key: str = "") -> str:
    metadata = [("authorization", f"Bearer {key}")] if key else None
    return "".join([piece.text async for piece in router.inference.Generate(ASK, metadata=metadata)])


@contextlib.asynccontextmanager
async def hanging(router: RunningRouter, worker: FakeWorker, num: int, key: str = "") -> AsyncIterator[None]:
    """`num` requests that are in flight meanwhile."""
    worker.hang_after = 1
    metadata = [("authorization", f"Bearer {key}")] if key else None
    calls = [router.inference.Generate(ASK, metadata=metadata) for _ in range(num)]
    for call in calls:
        assert await call.read()
    yield
    worker.hang_after = None
    for call in calls:
        call.cancel()


def retry_delay(error: grpc.aio.AioRpcError) -> float:
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            info = error_details_pb2.RetryInfo()
            assert status_pb2.Status.FromString(value).details[0].Unpack(info)
            return float(info.retry_delay.ToTimedelta().total_seconds())
    raise AssertionError("no details")


async def test_requests_in_flight_are_bounded(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_requests=2)
    async with hanging(router, worker, 2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(router)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_delay(caught.value) > 0
        async with httpx.AsyncClient(base_url=router.url) as client:
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] in ("1", "2")  # more, if the refusal before was a moment ago
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert (await client.get("/health")).status_code == 200
    async with asyncio.timeout(60):
        while True:  # the cancelled calls end a moment later
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await generate(router) == ANSWER
                break


async def test_choices_count_as_requests(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_requests=4)
    async with httpx.AsyncClient(base_url=router.url) as client:
        assert (await client.post("/v1/completions", json={**BODY, "n": 4})).status_code == 200
        assert (await client.post("/v1/completions", json={**BODY, "n": 5})).status_code == 429


async def test_a_key_has_its_share(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} name=a\n{OTHER} name=b\n")
    router = await start_router(worker, max_requests=4, api_keys_file=str(keys))
    async with hanging(router, worker, 2, KEY):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(router, KEY)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "this key" in (caught.value.details() or "")
        call = router.inference.Generate(ASK, metadata=[("authorization", f"Bearer {OTHER}")])
        assert await call.read()
        call.cancel()


async def test_a_client_may_not_ask_for_more_time(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, request_timeout=7)
    async for _ in router.inference.Generate(ASK, timeout=9999):
        pass
    assert worker.deadlines[0] is not None
    assert worker.deadlines[0] < 8  # gRPC rounds a call's time up


async def test_bodies_fit_the_context(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        large = await client.post("/v1/completions", content=b'{"prompt": "' + b"x" * 200_000)
        assert large.status_code == 413
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.inference.Chat(inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage()] * 100_000)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.inference.Generate(inference_pb2.GenerateRequest(prompt="x" * 5 * MIB)).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_errors_fit_into_a_call_s_end(router: RunningRouter) -> None:
    """A client may send megabytes where an error repeats them, and gets the error all the same."""
    request = inference_pb2.GenerateRequest(prompt="x", model="\u65e5" * 10_000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.inference.Generate(request).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    error = error_of_call("NOT_FOUND", "", caught.value.trailing_metadata())
    assert error.field == "model"
    assert error.reason.endswith("...")


async def test_heads_that_came_at_once_are_bounded_too() -> None:
    statuses: list[int] = []

    async def app(_scope: object, _receive: object, _send: object) -> None:
        statuses.append(200)

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    limited = LimitMiddleware(app, Gate())
    for number in (3, 5):
        headers = [(b"x-%d" % n, b"x" * 8000) for n in range(number)]
        scope = {"type": "http", "path": "/health", "raw_path": b"/health", "query_string": b"", "headers": headers}
        await limited(scope, _nothing, send)
    assert statuses == [200, 431]


async def _nothing() -> dict[str, Any]:
    raise AssertionError("no body is read")


async def test_bytes_are_bounded(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_buffered_mb=0.05)
    async with httpx.AsyncClient(base_url=router.url) as client:
        assert (await client.post("/v1/completions", content=b"x" * 60_000)).status_code == 429
        assert (await client.post("/v1/completions", content=b"x" * 40_000)).status_code == 400
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_slow_heads_are_cut_off(worker: FakeWorker, start_router: StartRouter, head: bytes) -> None:
    router = await start_router(worker, receive_timeout=0.5)
    reader, writer = await asyncio.open_connection(*address_of(router))
    writer.write(head)
    error = error_in(await asyncio.wait_for(reader.read(), 60), 408)
    assert error == {"message": "no head of a request came in time", "type": "timeout_error", **NO_FIELD}
    writer.close()


async def test_slow_bodies_are_cut_off(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, receive_timeout=0.5)
    reader, writer = await asyncio.open_connection(*address_of(router))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    answer = await asyncio.wait_for(reader.read(), 60)  # to the end of the connection
    assert b" 408 " in answer
    writer.close()


async def test_slow_messages_are_cut_off(worker: FakeWorker, start_router: StartRouter) -> None:
    """A gRPC call whose message never comes."""
    router = await start_router(worker, receive_timeout=0.5)
    generate_bytes: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = router.channel.stream_stream(
        "/baton.v1.InferenceService/Generate"
    )
    call = generate_bytes()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 60)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not come" in (caught.value.details() or "")
    assert await generate(router) == ANSWER


async def all_ended() -> None:
    async with asyncio.timeout(60):
        while sample("baton_router_requests_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def slow_over_rest(router: RunningRouter) -> AsyncIterator[None]:
    """A client that reads nothing of an answer of some 12 MiB."""
    loop = asyncio.get_running_loop()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await loop.sock_connect(slow, address_of(router))
        body = {"prompt": ["x"] * 4, "n": 8, "max_tokens": 200, "logprobs": 20, "stream": True}
        data = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
        await loop.sock_sendall(slow, head + data)
        await reaches("baton_router_requests_running", 1)
        yield


@contextlib.asynccontextmanager
async def slow_over_grpc(router: RunningRouter) -> AsyncIterator[None]:
    """A client that reads one message, and takes little beside it."""
    options = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(router.grpc_address, options=options) as channel:
        params = types_pb2.SamplingParams(max_tokens=200, logprobs=20)
        request = inference_pb2.GenerateRequest(prompt="x", sampling_params=params)
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        assert await call.read()
        yield


slow_readers = pytest.mark.parametrize("slow_reader", [slow_over_rest, slow_over_grpc])
SlowReader = Callable[[RunningRouter], contextlib.AbstractAsyncContextManager[None]]


@slow_readers
async def test_slow_readers_hold_up_nobody(
    worker: FakeWorker, start_router: StartRouter, slow_reader: SlowReader
) -> None:
    router = await start_router(worker)
    worker.answer = worker.answer * 12
    async with slow_reader(router):
        for _ in range(2):
            assert await generate(router) == ANSWER * 12
            assert sample("baton_router_requests_running") == 1
    await all_ended()


@slow_readers
async def test_slow_readers_are_cut_off(worker: FakeWorker, start_router: StartRouter, slow_reader: SlowReader) -> None:
    router = await start_router(worker, request_timeout=3, receive_timeout=0.5)
    worker.answer = worker.answer * 12
    async with slow_reader(router):
        await all_ended()


async def test_large_heads_are_refused(router: RunningRouter) -> None:
    reader, writer = await asyncio.open_connection(*address_of(router))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * 100_000)
    assert error_in(await asyncio.wait_for(reader.read(), 60), 400)["type"] == "invalid_request_error"
    writer.close()


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n"])
async def test_bytes_that_are_no_http_get_an_error_of_openais_shape(router: RunningRouter, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(*address_of(router))
    writer.write(sent)
    error = error_in(await asyncio.wait_for(reader.read(), 60), 400)
    assert error == {"message": "Invalid HTTP request received.", "type": "invalid_request_error", **NO_FIELD}
    writer.close()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("with_key", [False, True])
async def test_bytes_that_are_no_http_leave_no_stack(
    worker: FakeWorker,
    start_router: StartRouter,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    is_late: bool,
    with_key: bool,
) -> None:
    """Behind a head, together with it or while it is worked on; without its key, that head has an answer by then."""
    (tmp_path / "keys").write_text(KEY)
    router = await start_router(worker, **({"api_keys_file": str(tmp_path / "keys")} if with_key else {}))
    reader, writer = await asyncio.open_connection(*address_of(router))
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    answer = b""
    if is_late:
        writer.write(b"1\r\n{\r\n")
        await writer.drain()
        if with_key:
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        else:
            await asyncio.sleep(0.05)
    writer.write(b"rubbish\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        answer += await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 401" if is_late and with_key else b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    writer.close()
    assert not [record for record in caplog.records if record.exc_info]


async def test_idle_connections_give_way(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_connections=3)
    silent = [await asyncio.open_connection(*address_of(router)) for _ in range(6)]
    async with httpx.AsyncClient(base_url=router.url) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert await asyncio.wait_for(silent[0][0].read(), 60) == b""
    for _, writer in silent:
        writer.close()


async def test_connections_in_use_stay(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_connections=1)
    worker.hang_after = 1
    async with (
        httpx.AsyncClient(base_url=router.url) as client,
        client.stream("POST", "/v1/completions", json={**BODY, "stream": True}),
    ):
        reader, writer = await asyncio.open_connection(*address_of(router))
        answer = await asyncio.wait_for(reader.read(), 60)
        error = error_in(answer, 503)
        assert error == {
            "message": "there are as many connections as may be",
            "type": "service_unavailable_error",
            **NO_FIELD,
        }
        assert b"\r\nretry-after: 1\r\n" in answer
        writer.close()


async def test_grpc_connections_are_bounded(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_connections=2)
    assert await generate(router) == ANSWER
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(router.grpc_address, options=options) as second,
        grpc.aio.insecure_channel(router.grpc_address, options=options) as third,
    ):
        await inference_pb2_grpc.InferenceServiceStub(second).ListModels(inference_pb2.ListModelsRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(third).ListModels(inference_pb2.ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await generate(router) == ANSWER


async def test_unknown_paths_need_a_key(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    router = await start_router(worker, api_keys_file=str(tmp_path / "keys"))
    unknown: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = router.channel.unary_unary("/baton.v1.Nothing/Here")
    for key, code in ((None, "UNAUTHENTICATED"), (KEY, "UNIMPLEMENTED")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"", metadata=[("authorization", f"Bearer {key}")] if key else None)
        assert caught.value.code() is grpc.StatusCode[code]


async def test_a_watcher_that_reads_nothing_holds_up_nobody(router: RunningRouter, worker: FakeWorker) -> None:
    """It has no room for a single byte: with grpcio's own health service no status would change any more."""
    host, _, port = router.grpc_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    settings = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + b"\x00\x04\x00\x00\x00\x00"  # INITIAL_WINDOW_SIZE 0
    fields = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch", ":authority": "x"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    block = b"".join(b"\x00" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in fields.items())
    headers = len(block).to_bytes(3, "big") + b"\x01\x04\x00\x00\x00\x01" + block
    data = b"\x00\x00\x05\x00\x01\x00\x00\x00\x01" + b"\x00" * 5
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + headers + data)
    assert await reader.read(9)
    health = health_pb2_grpc.HealthStub(router.channel)
    await asyncio.sleep(0.2)
    await worker.stop()
    watching = health.Watch(health_pb2.HealthCheckRequest())
    async with asyncio.timeout(60):
        while (await watching.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass
    writer.close()


@pytest.mark.slow
async def test_nothing_is_read_for_a_missing_key(worker: FakeWorker, tmp_path: Path) -> None:
    """Messages near the largest, at a router in a process of its own: what it needs at most stays what it was."""
    (tmp_path / "keys").write_text(KEY)
    async with running(processes=1, decode=[worker.address], api_keys_file=str(tmp_path / "keys")) as router:
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate
            request = inference_pb2.GenerateRequest(prompt="x" * int(3.9 * MIB))
            before = peak_bytes(router.process.pid)
            outcomes = await asyncio.gather(*(ask(call, request) for _ in range(20)))
            assert set(outcomes) == {grpc.StatusCode.UNAUTHENTICATED}
        async with httpx.AsyncClient(base_url=router.url) as client:
            for _ in range(4):
                answer = await client.post("/v1/completions", content=b"x" * 20 * MIB)
                assert answer.status_code == 401
            spread = b'{"messages": [' + b"1," * 30_000 + b"1]}"
            headers = {"authorization": f"Bearer {KEY}"}
            for _ in range(8):
                answer = await client.post("/v1/chat/completions", content=spread, headers=headers)
                assert answer.json()["error"]["param"] == "messages[0]"
        assert peak_bytes(router.process.pid) - before < 40 * MIB


async def ask(
    call: grpc.aio.UnaryStreamMultiCallable[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
    request: inference_pb2.GenerateRequest,
) -> grpc.StatusCode:
    try:
        await call(request).read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def peak_bytes(pid: int) -> int:
    """VmHWM: the most memory that the process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


async def test_the_openapi_page_refers_to_what_it_holds(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        page = (await client.get("/openapi.json")).json()
    body = page["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    text = json.dumps(page)
    for name in text.split('"#/components/schemas/')[1:]:
        assert name.partition('"')[0] in page["components"]["schemas"]
    chat = page["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
