"""Streams that stay open, each with a token now and then: what so many cost a router, and what they do to others.

Clients are several processes, so that they wait for themselves as little as possible. Each has a pipe to this one:
`OPEN` comes once all its streams have their first token, `COUNT` and `END` go, and then come the seconds between
tokens, of all streams, from `COUNT` on. A text comes instead of any of them if a stream broke.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import uvloop

from bench.load.clients import Client, ask
from bench.load.percentiles import percentile
from bench.router.clients import Endpoint, chat
from bench.router.process_cost import cpu_s, peak_mib, resident_mib
from bench.router.systems import System
from common.errors import InternalError
from common.process.open_files import allow_open_files

OPEN, COUNT, END = "open", "count", "end"
STREAMS_PER_PROCESS = 2500
OPENED_PER_S = 150.0  # by all clients together
MAX_TOKENS = 50_000  # more than any stream lives to see
_PATIENCE_S = 300.0  # beyond the time that opening takes
_PAUSE_S = 0.05


def measure_open_streams(system: System, num: int, step_s: float, seconds: float) -> dict[str, list[float]]:
    """`seconds`: of counting, at least three steps. Raises `InternalError` if a stream breaks."""
    seconds = max(seconds, 3 * step_s)
    before_mib = resident_mib(system.pid)
    with _clients(system.endpoint, num) as pipes:
        for pipe in pipes:
            _receive(pipe, num / OPENED_PER_S + _PATIENCE_S)
        for pipe in pipes:
            pipe.send(COUNT)
        begin_s, before_s = time.perf_counter(), cpu_s(system.pid)
        answer_s = uvloop.run(_ask_meanwhile(system.endpoint, seconds))
        cores = (cpu_s(system.pid) - before_s) / (time.perf_counter() - begin_s)
        peak = peak_mib(system.pid)
        for pipe in pipes:
            pipe.send(END)
        between_s: list[float] = [gap for pipe in pipes for gap in _receive(pipe, _PATIENCE_S)]
    if not between_s:
        raise InternalError(f"{num} open streams had no two tokens in {seconds:.0f} s")
    late_s = [gap - step_s for gap in between_s]
    return {
        "peak MiB": [peak],
        "KiB a stream": [1024 * (peak - before_mib) / num],
        "CPU, % of a core": [100 * cores],  # that of the further requests included
        "one more request p50 ms": [1000 * percentile(answer_s, 0.5)],
        "one more request p99 ms": [1000 * percentile(answer_s, 0.99)],
        "token late p99 ms": [1000 * percentile(late_s, 0.99)],
    }


async def _ask_meanwhile(endpoint: Endpoint, seconds: float) -> list[float]:
    """Seconds that answers of one token take, asked for one after the other."""
    client, end = endpoint.connect(), time.perf_counter() + seconds
    took_s: list[float] = []
    try:
        while time.perf_counter() < end:
            took_s.append((await ask(client, chat(1))).ttft_s)
            await asyncio.sleep(_PAUSE_S)
    finally:
        await client.close()
    return took_s


@contextlib.contextmanager
def _clients(endpoint: Endpoint, num: int) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    num_processes = -(-num // STREAMS_PER_PROCESS)
    pipes: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for index in range(num_processes):
            here, there = context.Pipe()
            share = num // num_processes + (index < num % num_processes)
            arguments = (there, endpoint, share, OPENED_PER_S / num_processes)
            process = context.Process(target=hold_open, args=arguments, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _receive(pipe: Connection, patience_s: float) -> Any:
    try:
        if not pipe.poll(patience_s):
            raise InternalError(f"the clients' streams are not open after {patience_s:.0f} s")
        message = pipe.recv()
    except EOFError as error:
        raise InternalError("a process of clients died") from error
    if isinstance(message, str) and message != OPEN:
        raise InternalError(message)
    return message


def hold_open(pipe: Connection, endpoint: Endpoint, num: int, opened_per_s: float) -> None:
    """A process of clients, until `END`."""
    allow_open_files(num + 100)
    try:
        gaps = uvloop.run(_hold_open(pipe, endpoint, num, opened_per_s))
    except InternalError as error:
        pipe.send(error.message)
    else:
        pipe.send(gaps)


async def _hold_open(pipe: Connection, endpoint: Endpoint, num: int, opened_per_s: float) -> list[float]:
    client = endpoint.connect()
    streams = _Streams(client, num, opened_per_s)
    tasks = [asyncio.create_task(streams.one(number)) for number in range(num)]
    orders = asyncio.create_task(_follow(pipe, streams))
    try:
        done, _ = await asyncio.wait([orders, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if orders not in done:
            error = done.pop().exception()
            raise InternalError(f"an open stream broke: {error or 'its answer ended'}")
        orders.result()
    finally:
        for task in (orders, *tasks):
            task.cancel()
        await asyncio.gather(orders, *tasks, return_exceptions=True)
        await client.close()
    return streams.gaps_s


async def _follow(pipe: Connection, streams: _Streams) -> None:
    await streams.are_open.wait()
    pipe.send(OPEN)
    await _readable(pipe)
    pipe.recv()  # COUNT
    streams.counts_from = time.perf_counter()
    await _readable(pipe)
    pipe.recv()  # END


async def _readable(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(pipe.fileno(), event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(pipe.fileno())


class _Streams:
    def __init__(self, client: Client, num: int, opened_per_s: float) -> None:
        self.gaps_s: list[float] = []
        self.counts_from = float("inf")
        self.are_open = asyncio.Event()
        self._client = client
        self._num_waiting = num  # for their first token
        self._opened_per_s = opened_per_s

    async def one(self, number: int) -> None:
        await asyncio.sleep(number / self._opened_per_s)
        before = 0.0  # when the last token came; of the first it does not matter, since that comes between steps
        num = 0
        async for more in self._client.events(chat(MAX_TOKENS)):
            if not more:
                continue
            now = time.perf_counter()
            num += 1
            if num == 1:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self.are_open.set()
            elif num > 2 and before >= self.counts_from:
                self.gaps_s.append(now - before)
            before = now
