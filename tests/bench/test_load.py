"""The load generator: what times count from, and its connections."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from bench.load.http import HttpConnections, request
from bench.load.loops import open_loop
from bench.load.percentiles import percentile, summary
from common.errors import InternalError
from tests.bench.test_router_bench import serving


async def test_times_count_from_when_a_request_was_due() -> None:
    """Also of a request that was sent late: here because the one before it holds the only place."""

    async def ask(number: int) -> int:
        await asyncio.sleep(0.02)
        return number

    sent = await open_loop([0.0, 0.0, 0.001], ask, max_in_flight=1)
    assert [one.result for one in sent] == [0, 1, 2]
    assert sent[1].lag_s >= 0.02
    assert sent[1].latency_s >= 0.04
    assert all(one.latency_s == one.lag_s + (one.ended - one.sent) for one in sent)
    assert sent[2].due - sent[0].due == pytest.approx(0.001)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    num_now, all_here = 0, asyncio.Event()

    async def ask(_: int) -> None:
        nonlocal num_now
        num_now += 1
        if num_now == 20:
            all_here.set()
        await all_here.wait()

    assert len(await open_loop([0.0] * 20, ask)) == 20


async def test_connections_take_turns_and_no_more_are_made_than_are_needed() -> None:
    asked: list[int] = []  # the connection of each request
    numbers = itertools.count()
    both = asyncio.Barrier(2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        while True:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            asked.append(number)
            if len(asked) <= 2:
                await both.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with serving(answer) as url:
        connections = HttpConnections(url)

        async def ask() -> bytes:
            async with connections.asked(request("POST", "/", b"{}")) as (head, reader):
                assert (head.status, head.length) == (200, 2)
                return await reader.readexactly(2)

        assert [*await asyncio.gather(ask(), ask())] == [b"{}"] * 2
        for _ in range(6):
            await ask()
        connections.close()
    assert {*asked} == {0, 1}
    assert all(one != other for one, other in itertools.pairwise(asked[2:]))


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 429 Full\r\nContent-Length: 3\r\n\r\nyes", b"yes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nye\r\n1\r\ns\r\n0\r\n\r\n", b"yes"),
        (b"HTTP/1.1 200 OK\r\n\r\nyes", b"yes"),  # ends with the connection
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nyes", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nyes\r\n", None),
        (b"HTTP/1.0 200 OK\r\n\r\nyes", None),
    ],
)
async def test_a_whole_answer(answer: bytes, body: bytes | None) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    async with serving(serve) as url:
        connections = HttpConnections(url)
        for _ in range(2):  # a connection that has ended is not asked again
            if body is None:
                with pytest.raises(InternalError, match="cut off"):
                    await connections.whole(request("GET", "/x", api_key="k"))
            else:
                head, found = await connections.whole(request("GET", "/x", api_key="k"))
                assert (head.status, found) == (int(answer[9:12]), body)
        connections.close()
    assert len(asked) == 2
    assert asked[0].startswith(b"GET /x HTTP/1.1\r\nHost: bench\r\n")
    assert b"Authorization: Bearer k\r\n" in asked[0]
    assert b"Content" not in asked[0]


def test_percentiles_are_of_the_values_themselves() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert summary("ms", values) == {"ms p50": 50.0, "ms p90": 90.0, "ms p99": 99.0}
    assert summary("ms", []) == {}
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)
