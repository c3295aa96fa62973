"""The bytes of a streamed answer on its connection, and the end of one whose client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import h11
import pytest

from router.api.rest.http.protocol import ON_GONE, WRITE_PIECE, _take_body, _write_piece
from router.api.rest.openai.disconnect import ClientGoneError, EventStream, unless_gone
from tests.router.conftest import StartRouter
from tests.support.fake_worker import ANSWER, FakeWorker

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 99}).encode()


def question(version: str) -> bytes:
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + BODY


def text_of(events: bytes) -> str:
    chunks = [json.loads(line[len("data: ") :]) for line in events.decode().split("\n\n")[:-2]]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_pieces_are_chunks_of_http_1_1(worker: FakeWorker, start_router: StartRouter) -> None:
    """h11, which did not write them, reads them; and the connection takes the next request."""
    router = await start_router(worker)
    parts = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    client = h11.Connection(h11.CLIENT)
    for _ in range(2):
        request = h11.Request(
            method="POST", target="/v1/chat/completions", headers=[("Host", "x"), ("Content-Length", str(len(BODY)))]
        )
        for part in (request, h11.Data(data=BODY), h11.EndOfMessage()):
            writer.write(client.send(part) or b"")
        got, headers = b"", dict[bytes, bytes]()
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                client.receive_data(await asyncio.wait_for(reader.read(2**16), 20))
            elif isinstance(event, h11.Response):
                headers = dict(event.headers)
            elif isinstance(event, h11.Data):
                got += event.data
        assert headers[b"transfer-encoding"] == b"chunked"
        assert got.endswith(b"data: [DONE]\n\n")
        assert text_of(got) == ANSWER
        client.start_next_cycle()
    writer.close()


@pytest.mark.parametrize("cuts", [(), (1,), (0, 40, -1)])
async def test_a_body_may_come_with_its_head_or_later(
    worker: FakeWorker, start_router: StartRouter, cuts: tuple[int, ...]
) -> None:
    router = await start_router(worker)
    parts = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    sent = question("1.1")
    start = len(sent) - len(BODY)
    ends = [start + cut % len(BODY) for cut in cuts]
    for begin, end in zip([0, *ends], [*ends, len(sent)], strict=True):
        writer.write(sent[begin:end])
        await writer.drain()
        await asyncio.sleep(0.1)
    got = await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 20)
    assert got.startswith(b"HTTP/1.1 200 ")
    writer.close()


def test_a_body_is_taken_if_all_of_it_is_there() -> None:
    def cycle(**others: object) -> Any:
        event = asyncio.Event()
        event.set()
        state = {"more_body": False, "disconnected": False, "waiting_for_100_continue": False}
        return SimpleNamespace(body=bytearray(b"{}"), message_event=event, **{**state, **others})

    for name in ("more_body", "disconnected", "waiting_for_100_continue"):
        others = cycle(**{name: True})
        assert _take_body(others) is None
        assert others.body == b"{}"
        assert others.message_event.is_set()  # `receive` gives it
    whole = cycle()
    assert _take_body(whole) == b"{}"
    assert whole.body == b""
    assert not whole.message_event.is_set()  # the next `receive` waits for what comes next


async def test_a_client_of_http_1_0_gets_no_chunks(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker)
    parts = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(question("1.0"))
    head, _, got = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert got.startswith(b"data: {")
    assert got.endswith(b"data: [DONE]\n\n")
    assert text_of(got) == ANSWER
    writer.close()


async def test_a_piece_waits_for_a_slow_client() -> None:
    written: list[bytes] = []
    may_write = asyncio.Event()
    flow = SimpleNamespace(write_paused=True, drain=may_write.wait)
    cycle: Any = SimpleNamespace(flow=flow, disconnected=False, transport=SimpleNamespace(write=written.append))
    writing = asyncio.ensure_future(_write_piece(cycle, b"x" * 20) or asyncio.sleep(0))
    await asyncio.sleep(0)
    assert not written
    may_write.set()
    await writing
    assert written == [b"14\r\n" + b"x" * 20 + b"\r\n"]
    flow.write_paused = False
    assert _write_piece(cycle, b"yz") is None, "nothing to wait for"
    assert written[1:] == [b"2\r\nyz\r\n"]
    cycle.disconnected = True
    assert _write_piece(cycle, b"more") is None
    assert _write_piece(cycle, b"") is None
    assert len(written) == 2


class Client:
    """An ASGI `receive` of a client that stays until it is told to go."""

    def __init__(self) -> None:
        self.goes = asyncio.Event()
        self.scope: dict[str, object] = {}

    async def receive(self) -> dict[str, str]:
        await self.goes.wait()
        return {"type": "http.disconnect"}


async def test_work_for_a_client_that_goes_away_is_cancelled() -> None:
    client = Client()
    asyncio.get_running_loop().call_later(0.01, client.goes.set)
    request: Any = client
    with pytest.raises(ClientGoneError):
        await unless_gone(request, asyncio.Event().wait())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the task itself goes on"
    there: Any = Client()
    assert await unless_gone(there, asyncio.sleep(0, "done")) == "done"


async def test_work_is_cancelled_by_a_connection_that_tells_it() -> None:
    """As this router's connections do: no task waits beside the work."""
    told: list[Callable[[], None] | None] = []
    request: Any = SimpleNamespace(scope={ON_GONE: told.append}, receive=None)
    assert await unless_gone(request, asyncio.sleep(0, "done")) == "done"
    gone, nobody = told
    assert gone is not None
    assert nobody is None
    gone()  # it was on its way when the work ended
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    asyncio.get_running_loop().call_later(0.01, lambda: told[2] and told[2]())
    with pytest.raises(ClientGoneError):
        await unless_gone(request, asyncio.Event().wait())
    assert task.cancelling() == 0, "the task itself goes on"


async def test_a_cancel_from_elsewhere_stays_one() -> None:
    request: Any = Client()
    task = asyncio.create_task(unless_gone(request, asyncio.Event().wait()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_event_stream_without_a_short_way_is_plain_asgi() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"b"
        yield b"c"

    client, pieces, sent = Client(), [], []

    async def send(message: Any) -> None:
        sent.append(message)

    def write(piece: bytes) -> Awaitable[None] | None:
        pieces.append(piece)
        return asyncio.sleep(0) if len(pieces) == 2 else None  # the client is slow for a moment

    async def receive() -> Any:
        return await client.receive()

    await EventStream(b"a", events(), {})({"type": "http"}, receive, send)
    assert b"".join(message.get("body", b"") for message in sent) == b"abc"
    assert [message.get("more_body") for message in sent] == [None, True, True, True, False]
    sent.clear()
    await EventStream(b"a", events(), {})({"type": "http", WRITE_PIECE: write}, receive, send)
    assert pieces == [b"a", b"b", b"c"]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
