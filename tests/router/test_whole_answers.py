"""The bytes of answers that one write has all of, and what a connection does after them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from common import metrics
from router.api.rest.http.protocol import MAX_AHEAD_BYTES, Connections
from tests.router.conftest import StartRouter
from tests.support.fake_worker import ANSWER, FakeWorker

REQUEST = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99}


def question(request_id: str, *headers: str) -> bytes:
    body = json.dumps({**REQUEST, "request_id": request_id})
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join([*lines, "", body]).encode()


async def answers_to(router_url: str, sent: bytes, num: int) -> tuple[list[tuple[h11.Response, bytes]], bool]:
    """The first `num` answers, as h11 reads them; whether the connection was closed after them."""
    parts = urlsplit(router_url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(sent)
    client, answers = h11.Connection(h11.CLIENT), list[tuple[h11.Response, bytes]]()
    for _ in range(num):
        client.send(h11.Request(method="POST", target="/", headers=[("Host", "x")]))
        client.send(h11.EndOfMessage())
        head, body = None, b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                client.receive_data(await asyncio.wait_for(reader.read(2**16), 20))
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
        assert head is not None
        answers.append((head, body))
        if client.their_state is h11.MUST_CLOSE:
            break
        client.start_next_cycle()
    is_closed = client.their_state is h11.MUST_CLOSE and await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    return answers, is_closed


async def test_requests_that_come_at_once_are_answered_one_after_the_other(
    worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker)
    ids = [f"request-{number}" for number in range(5)]
    wrong = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    sent = b"".join([*map(question, ids[:4]), wrong, question(ids[4])])
    answers, is_closed = await answers_to(router.url, sent, 6)
    assert [head.status_code for head, _ in answers] == [200, 200, 200, 200, 400, 200]
    good = [json.loads(body) for head, body in answers if head.status_code == 200]
    assert [one["baton"]["request_id"] for one in good] == ids
    assert {one["choices"][0]["message"]["content"] for one in good} == {ANSWER}
    assert [dict(head.headers)[b"x-request-id"].decode() for head, _ in answers if head.status_code == 200] == ids
    assert not is_closed


async def test_a_client_cannot_send_requests_without_end_ahead_of_its_answers(
    worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker)
    refused = metrics.router_refused.labels("read ahead")
    before = refused._value.get()
    parts = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    with contextlib.suppress(ConnectionError):
        writer.write(question("ahead") * (8 * MAX_AHEAD_BYTES // len(question("ahead"))))
        while await asyncio.wait_for(reader.read(2**16), 20):
            pass
    writer.close()
    assert refused._value.get() == before + 1
    answers, _ = await answers_to(router.url, question("another"), 1)
    assert answers[0][0].status_code == 200


@pytest.mark.parametrize("value", ["close", "Close", "keep-alive, close"])
async def test_a_connection_closes_after_its_answer_if_its_client_asks(
    value: str, worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker)
    sent = question("first", f"Connection: {value}") + question("second")
    answers, is_closed = await answers_to(router.url, sent, 2)
    assert [json.loads(body)["baton"]["request_id"] for _, body in answers] == ["first"]
    assert is_closed


async def test_bytes_that_are_no_request_after_an_answer_are_refused(
    worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker)
    answers, is_closed = await answers_to(router.url, question("one") + b"\0\r\n\r\n", 2)
    assert [head.status_code for head, _ in answers] == [200, 400]
    assert is_closed


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ([(b"content-length", b"2"), (b"x", b"y")], False),
        ([(b"content-length", b"2"), (b"x", b"y\r\nset-cookie: z")], True),
        ([(b"content-length", b"2"), (b"x", b"y\nz")], True),
        ([(b"content-length", b"3")], True),
    ],
)
async def test_a_head_that_http_does_not_allow_is_left_to_h11(
    headers: list[tuple[bytes, bytes]], *, is_refused: bool
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    failed: list[BaseException] = []

    async def observed(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except BaseException as error:
            failed.append(error)

    config = uvicorn.Config(observed, log_config=None, lifespan="off", ws="none")
    config.load()
    protocol, transport = Connections(1, 30.0).protocol()(config, ServerState(), {}), Transport()
    protocol.connection_made(transport)
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.gather(*protocol.tasks)
    assert [type(error) for error in failed] == ([h11.LocalProtocolError] if is_refused else [])
    assert (b"set-cookie" in transport.written) is False
    assert is_refused or transport.written.endswith(b"\r\n\r\nok")
    protocol.connection_lost(None)


LARGE = bytes(16 * 2**20)  # more than the kernel takes of an answer that nobody reads


@contextlib.asynccontextmanager
async def large_answers(head_timeout_s: float) -> AsyncGenerator[tuple[Connections, str, int], None]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(LARGE))]})
        await send({"type": "http.response.body", "body": LARGE})

    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_keep_alive=0)
    config.load()
    connections = Connections(9, head_timeout_s)
    make = connections.protocol()
    server = await asyncio.get_running_loop().create_server(lambda: make(config, ServerState(), {}), "127.0.0.1", 0)
    async with server:
        yield connections, *server.sockets[0].getsockname()


@pytest.mark.parametrize("header", [b"Connection: close\r\n", b""])
async def test_who_never_takes_an_answer_loses_the_connection(header: bytes) -> None:
    async with large_answers(0.2) as (connections, host, port):
        reader, writer = await asyncio.open_connection(host, port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
        await reader.readexactly(1)
        assert connections.num == 1
        async with asyncio.timeout(20):
            while connections.num:  # noqa: ASYNC110 (nothing tells of it)
                await asyncio.sleep(0.02)
        writer.transport.abort()


async def test_who_takes_an_answer_slowly_gets_all_of_it() -> None:
    async with large_answers(0.3) as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port, limit=2**16)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        num = 0
        while more := await reader.read(2**20):
            num += len(more)
            await asyncio.sleep(0.01)
        assert num > len(LARGE)
        writer.close()
