"""The load generator: when requests come, how long they are, and what their times count from."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable, Iterator

import pytest

from bench.load import arrivals, sizes
from bench.load.http import HttpConnections, post
from bench.load.loops import open_loop
from bench.load.percentiles import percentile, summary
from tests.bench.test_router_bench import serving

NUM = 20_000


@pytest.mark.parametrize(
    ("times", "cv"),
    [
        (lambda: arrivals.poisson(4.0, 1), 1.0),
        (lambda: arrivals.gamma(4.0, 0.25, 1), 2.0),
        (lambda: arrivals.gamma(4.0, 16.0, 1), 0.25),
        (lambda: arrivals.bursts(4.0, 5, 1), math.sqrt(2 * 5 - 1)),
        (lambda: arrivals.steady(4.0), 0.0),
    ],
)
def test_arrivals_have_their_rate_and_burstiness(times: Callable[[], Iterator[float]], cv: float) -> None:
    at = arrivals.first(times(), NUM)
    assert at == arrivals.first(times(), NUM)  # fixed by the seed
    gaps = [after - before for before, after in itertools.pairwise(at)]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.06)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.06, abs=1e-6)


def test_a_poisson_process_is_a_gamma_process_of_shape_one() -> None:
    assert arrivals.first(arrivals.poisson(2.0, 3), 9) == arrivals.first(arrivals.gamma(2.0, 1.0, 3), 9)


def test_arrivals_of_a_trace_and_their_end() -> None:
    assert arrivals.from_trace([105.0, 101.0, 103.0], speed=2.0) == [0.0, 1.0, 2.0]
    assert arrivals.from_trace([]) == []
    assert arrivals.until(arrivals.steady(2.0), 1.0) == [0.0, 0.5]
    with pytest.raises(ValueError, match=r"^rate: "):
        next(arrivals.poisson(0.0, 1))
    with pytest.raises(ValueError, match=r"^speed: "):
        arrivals.from_trace([], speed=-1.0)


def test_sizes() -> None:
    assert list(itertools.islice(sizes.fixed(7), 2)) == [7, 7]
    some = list(itertools.islice(sizes.uniform(2, 5, 1), 1000))
    assert {*some} == {2, 3, 4, 5}
    many = list(itertools.islice(sizes.lognormal(100.0, 1.0, 10, 1000, 1), NUM))
    assert statistics.median(many) == pytest.approx(100, rel=0.05)
    assert (min(many), max(many)) == (10, 1000)
    with pytest.raises(ValueError, match=r"^tokens: "):
        next(sizes.uniform(5, 2, 1))


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
            async with connections.asked(post("/", {})) as (head, reader):
                assert (head.status, head.length) == (200, 2)
                return await reader.readexactly(2)

        assert [*await asyncio.gather(ask(), ask())] == [b"{}"] * 2
        for _ in range(6):
            await ask()
        connections.close()
    assert {*asked} == {0, 1}
    assert all(one != other for one, other in itertools.pairwise(asked[2:]))


def test_percentiles_are_of_the_values_themselves() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert summary("ms", values) == {"ms p50": 50.0, "ms p90": 90.0, "ms p99": 99.0}
    assert summary("ms", []) == {}
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)
