"""What a client hears whose request is refused while it still sends: the answer and its words, and no broken pipe.
And how long it may go on sending: not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import TlsSettings
from common.tls import TlsFiles
from router.api.rest.http import protocol
from tests.each_case import each_case
from tests.kube.certificates import make_ca, make_leaf
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.test_limits import address_of
from tests.support.fake_worker import FakeWorker

PIECE = b"x" * 65536
LARGE = 128  # pieces: 8 MiB, more than both ends' buffers hold
JSON = {"Content-Type": "application/json"}
KEY = "k" * 32


def pieces(num: int = LARGE) -> Iterator[bytes]:
    for _ in range(num):
        yield PIECE


class Said:
    """What a client heard."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.message = str(json.loads(body)["error"]["message"])


def with_urllib(url: str, headers: dict[str, str], chunked: bool, trust: ssl.SSLContext | None) -> Said:
    """It asks for the end of the connection, and reads nothing before it has sent everything."""
    data = pieces() if chunked else PIECE * LARGE
    request = urllib.request.Request(url, data, headers, method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60, context=trust)
    with caught.value as answer:
        return Said(answer.code, answer.read())


def with_http_client(url: str, headers: dict[str, str], chunked: bool, trust: ssl.SSLContext | None) -> Said:
    """It keeps its connection for the next request."""
    host, _, path = url.partition("://")[2].partition("/")
    secure = (lambda: http.client.HTTPSConnection(host, timeout=60, context=trust)) if trust else None
    connection = secure() if secure else http.client.HTTPConnection(host, timeout=60)
    try:
        for _ in range(2):
            connection.request("POST", f"/{path}", pieces() if chunked else PIECE * LARGE, headers)
            with connection.getresponse() as answer:
                said = Said(answer.status, answer.read())
        return said
    finally:
        connection.close()


CLIENTS = {"urllib": with_urllib, "http.client": with_http_client}
Case = tuple[int, str, str, dict[str, str]]
REFUSED: list[Case] = [
    (401, "an API key is needed", "/v1/completions", JSON),
    (401, "not known here", "/v1/completions", {**JSON, "Authorization": "Bearer wrong"}),
    (404, "Not Found", "/v1/nothing", {**JSON, "Authorization": f"Bearer {KEY}"}),
    (405, "Method Not Allowed", "/v1/models", {**JSON, "Authorization": f"Bearer {KEY}"}),
    (413, "the body has more than", "/v1/completions", {**JSON, "Authorization": f"Bearer {KEY}"}),
    (413, "the body has more than", "/tokenize", {**JSON, "Authorization": f"Bearer {KEY}"}),
    (
        415,
        "must be application/json",
        "/v1/completions",
        {"Content-Type": "text/csv", "Authorization": f"Bearer {KEY}"},
    ),
]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text(KEY)
    return str(tmp_path / "keys")


@pytest.mark.parametrize("name", CLIENTS)
@each_case(("chunked", "case"), itertools.product([False, True], REFUSED))
async def test_stock_clients_hear_why(
    worker: FakeWorker, start_router: StartRouter, keys: str, name: str, case: Case, chunked: bool
) -> None:
    router = await start_router(worker, api_keys_file=keys)
    status, words, path, headers = case
    said = await asyncio.to_thread(CLIENTS[name], router.url + path, headers, chunked, None)
    assert (said.status, words in said.message) == (status, True), said.message


async def test_too_many_bytes_of_all_requests(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_buffered_mb=0.05, max_request_mb=64)
    for chunked in (False, True):
        said = await asyncio.to_thread(with_urllib, f"{router.url}/v1/completions", JSON, chunked, None)
        assert (said.status, "the router holds" in said.message or said.message) == (429, True)


@each_case("name", CLIENTS)
async def test_over_tls(start_router: StartRouter, tmp_path: Path, name: str) -> None:
    make_ca(tmp_path, "ca")
    make_leaf(tmp_path, "leaf", "ca", "/CN=baton", "IP:127.0.0.1")
    settings = TlsSettings(tls_cert=f"{tmp_path}/leaf.crt", tls_key=f"{tmp_path}/leaf.key", tls_ca=f"{tmp_path}/ca.crt")
    worker = FakeWorker()
    await worker.start(tls=TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca))
    try:
        router = await start_router(worker, **settings.model_dump())
        trust = ssl.create_default_context(cafile=settings.tls_ca)
        for chunked in (False, True):
            said = await asyncio.to_thread(CLIENTS[name], f"{router.url}/v1/completions", JSON, chunked, trust)
            assert (said.status, said.message[:22]) == (413, "the body has more than")
    finally:
        await worker.stop()


async def test_bytes_that_are_no_http(router: RunningRouter) -> None:
    """They keep coming for a while."""
    assert b" 400 " in await asyncio.to_thread(sends_on, router, b"rubbish\r\n\r\n", LARGE)


async def test_one_connection_too_many(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_connections=1)
    worker.hang_after = 1
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    reader, writer = await asyncio.open_connection(*address_of(router))
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"data: ")
    said = await asyncio.to_thread(with_urllib, f"{router.url}/v1/completions", JSON, False, None)
    assert (said.status, said.message) == (503, "there are as many connections as may be")
    writer.close()


async def test_who_asks_for_leave_need_not_send(router: RunningRouter) -> None:
    """The connection is closed after the refusal: bytes that may or may not come would be taken for a request."""
    reader, writer = await asyncio.open_connection(*address_of(router))
    writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in answer
    writer.close()


async def test_who_asks_for_leave_and_has_it_sends(router: RunningRouter) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    reader, writer = await asyncio.open_connection(*address_of(router))
    writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" not in head
    writer.close()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
ENDLESS = HEAD + b"Content-Length: 999999999999\r\n"
STAYS, GOES = ENDLESS + b"\r\n", ENDLESS + b"Connection: close\r\n\r\n"


def sends_on(router: RunningRouter, head: bytes, num: int = 10**6, wait_s: float = 0.0) -> bytes:
    """What comes back while `num` pieces are sent, or until the router ends the connection."""
    got = bytearray()
    with socket.create_connection(address_of(router), timeout=60) as connection:
        connection.sendall(head)
        with contextlib.suppress(ConnectionError):
            for _ in range(num):
                connection.sendall(b"x" if wait_s else PIECE)
                time.sleep(wait_s)
            connection.shutdown(socket.SHUT_WR)
        connection.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while more := connection.recv(65536):
                got += more
    return bytes(got)


@each_case("head", [STAYS, GOES, b"rubbish\r\n\r\n"])
async def test_bytes_behind_a_refusal_are_bounded(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """The client would send 64 GiB. It ends with a broken connection."""
    monkeypatch.setattr(protocol, "MAX_LATE_BYTES", 2**20)
    await asyncio.wait_for(asyncio.to_thread(sends_on, router, head), 60)


@each_case("head", [STAYS, GOES, b"rubbish\r\n\r\n"])
async def test_time_behind_a_refusal_is_bounded(worker: FakeWorker, start_router: StartRouter, head: bytes) -> None:
    """A byte now and then, without end: as long as a body may take, and no longer."""
    router = await start_router(worker, receive_timeout=0.5)
    await asyncio.wait_for(asyncio.to_thread(sends_on, router, head, wait_s=0.02), 60)


async def _trickle(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.6)


@each_case("head", [STAYS, GOES, b"rubbish\r\n\r\n"])
async def test_silence_behind_a_refusal_is_bounded(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """So it is closed long before the time of a body is over."""
    monkeypatch.setattr(protocol, "SILENT_S", 0.2)
    reader, writer = await asyncio.open_connection(*address_of(router))
    writer.write(head)
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    async with asyncio.timeout(20):
        with pytest.raises(ConnectionError):
            await _trickle(writer)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
