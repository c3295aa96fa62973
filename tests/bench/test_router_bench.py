"""`baton bench router`: its clients, workers, loads and figures, and the whole of it."""

from __future__ import annotations

import asyncio
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import click
import pytest
import uvloop
from rich.console import Console

from bench.instant_http_worker import InstantHttpWorker
from bench.kv.report import print_results
from bench.kv.results import Results
from bench.load.clients import Request, RestClient, ask
from bench.processes import started
from bench.router import systems
from bench.router.clients import Endpoint, chat
from bench.router.command import router
from bench.router.load import closed_loop, open_loop
from bench.router.open_streams import COUNT, END, OPEN, hold_open
from bench.router.parts import TABLES, add_bars, add_ratios
from bench.router.process_cost import cpu_s, peak_mib
from bench.router.systems import Spec
from bench.router.systems import router as system_of
from bench.steps import Steps
from common.errors import InternalError, StartupError

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def serving(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """The URL of a server whose connections end with it. asyncio would leave open ones to the garbage collector, and
    whichever test runs then would fail."""
    connections: dict[asyncio.Future[None], asyncio.StreamWriter] = {}

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[asyncio.ensure_future(serve(reader, writer))] = writer

    try:
        async with await asyncio.start_server(begin, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for writer in connections.values():
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in connections.values()), return_exceptions=True)


@asynccontextmanager
async def http_worker(step_s: float = 0.001) -> AsyncIterator[str]:
    async with serving(InstantHttpWorker(step_s).serve) as url:
        yield url


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--only", "memory"], "'memory' is not one of cpu, ttft, open"),
        (["--interfaces", "soap"], "'soap' is not one of rest, grpc"),
        (["--streams", "1,0"], "0 is below 1"),
        (["--streams", "many"], "'many' is not numbers"),
        (["--rate", "0"], "0.0 is not in the range x>0"),
        (["--tokens", "1"], "1 is not in the range x>=2"),
    ],
)
def test_asked_wrongly(arguments: list[str], line: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        router.main(arguments, standalone_mode=False)
    assert line in caught.value.format_message()


@pytest.mark.parametrize(
    ("peers", "line"),
    [
        ("nginx", "'nginx' is not one of vllm-router, sglang-router"),
        ("vllm-router=/nowhere/vllm-router", "no command '/nowhere/vllm-router'; pip install vllm-router into"),
    ],
)
def test_a_peer_that_is_not_there(peers: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert router.main(["--peers", peers], standalone_mode=False) == 2
    assert line in capsys.readouterr().err


def test_a_peer_is_started_by_its_own_flags(tmp_path: Path) -> None:
    command = tmp_path / "peer"
    command.write_text('#!/bin/sh\necho "$@" > "$0.flags"\nexit 1\n')
    command.chmod(0o755)
    behind = [Endpoint("rest", "http://127.0.0.1:9")]
    for name, first in (("vllm-router", "--log-level=error --policy="), ("sglang-router", "launch --log-level=error ")):
        with pytest.raises(StartupError), system_of(Spec(name, "rest"), behind, {name: str(command)}, 1):
            pass
        flags = (tmp_path / "peer.flags").read_text()
        assert flags.startswith(first)
        assert flags.endswith("--worker-urls http://127.0.0.1:9\n")


def test_a_peer_that_ends_at_once_is_told_and_not_signalled() -> None:
    spec, behind = Spec("vllm-router", "rest"), [Endpoint("rest", "http://127.0.0.1:9")]
    with (
        pytest.raises(StartupError, match="vllm-router ended with exit code 1"),
        system_of(spec, behind, {"vllm-router": "false"}, 1),
    ):
        pass


@pytest.mark.timeout(120)
def test_a_peer_that_takes_requests_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, started(["sleep", "600"], "the peer") as child:
        endpoint = Endpoint("rest", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StartupError, match="the peer does not answer in 0 s: it took a request and said nothing"):
            systems._wait_for_an_answer(child, endpoint, start_s=0.5)


async def test_each_token_of_an_http_worker_is_one_event() -> None:
    async with http_worker() as url:
        client = RestClient(url)
        for max_tokens in (1, 2, 7):  # one connection, kept open
            assert (await ask(client, chat(max_tokens))).num_events == max_tokens
        asked = await closed_loop(client, 3, 5, 0.0)
        assert [one.num_events for one in asked] == [5, 5, 5]
        await client.close()


async def test_an_http_worker_takes_either_name_of_the_length() -> None:
    async with http_worker() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        for name in ("max_tokens", "max_completion_tokens"):
            body = json.dumps({name: 3}).encode()
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            answer = json.loads(await reader.readexactly(int(head.partition(b"content-length: ")[2])))
            assert answer["usage"]["completion_tokens"] == 3
        writer.close()


async def test_an_http_worker_tells_routers_of_its_model() -> None:
    async with http_worker() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        about = json.loads(await reader.readexactly(int(head.partition(b"content-length: ")[2])))
        assert [model["id"] for model in about["data"]] == ["instant"]
        writer.close()


CHUNKED = [
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b'6\r\ndata: {"role"}\n\n\r\n',
    b'6\r\ndata: {"a"}\n\n\r\n6\r\ndata: {"b"}\n\n\r\n',
    b"6\r\ndata: [DONE]\n\n\r\n",
    b"0\r\n",
    b"\r\n",
]


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        (CHUNKED, [0, 2, 0, 0, 0]),  # the role is no token, wherever it comes, and neither is the end
        ([b"".join(CHUNKED)], [2]),
        (CHUNKED[:4], "cut off"),
        ([b"HTTP/1.1 429 Too Many Requests\r\n\r\n"], "429"),
    ],
)
async def test_what_a_client_counts(parts: list[bytes], outcome: list[int] | str) -> None:
    may_go_on = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            if part in CHUNKED[1:]:  # the head counts as nothing
                await may_go_on.wait()
                may_go_on.clear()
        writer.close()

    async def count(client: RestClient) -> list[int]:
        counted = []
        async for num in client.events(chat(4)):
            counted.append(num)
            may_go_on.set()
        return counted

    async with serving(answer) as url:
        client = RestClient(url)
        if isinstance(outcome, str):
            with pytest.raises(InternalError, match=outcome):
                await count(client)
        else:
            assert await count(client) == outcome
        may_go_on.set()
        await client.close()


@pytest.mark.parametrize("kind", ["rest", "grpc", "decode"])
async def test_a_router_that_is_gone_is_an_error_of_baton(kind: str) -> None:
    """So that the others are measured all the same."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        client = Endpoint(kind, f"http://{address}" if kind == "rest" else address).connect()
        with pytest.raises(InternalError, match=r"takes no connection|answers UNAVAILABLE"):
            await ask(client, chat(1))
        await client.close()


class Slow:
    """A client whose requests take a little; it counts how many it has at a time."""

    def __init__(self) -> None:
        self.num_now = self.num_most = self.num_asked = 0

    async def events(self, request: Request) -> AsyncIterator[int]:
        self.num_asked += 1
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        await asyncio.sleep(0.001)
        self.num_now -= 1
        yield request.max_tokens

    async def close(self) -> None:
        pass


async def test_a_closed_loop_has_so_many_requests_at_a_time() -> None:
    client = Slow()
    asked = await closed_loop(client, 3, 4, 0.01)
    assert client.num_most == 3
    assert len(asked) == client.num_asked >= 3


async def test_an_open_loop_asks_however_many_wait() -> None:
    counts = [len(await open_loop(Slow(), 2000.0, 4, 0.1)) for _ in range(2)]
    assert counts[0] == counts[1]  # the same arrivals
    assert 150 < counts[0] < 250


@pytest.mark.parametrize("first_byte", [b"", b"H"])
async def test_a_connection_that_was_closed_while_idle_is_made_again_once(first_byte: bytes) -> None:
    """Not if some of the answer came: it may have been the answer to this request."""
    num_requests: list[int] = []  # of each connection

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_requests.append(0)
        for closes in (False, True):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            num_requests[-1] += 1
            writer.write(first_byte if closes else b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with serving(answer) as url:
        client = RestClient(url)
        await ask(client, chat(1))
        if first_byte:
            with pytest.raises(InternalError, match="cut off"):
                await ask(client, chat(1))
        else:
            await ask(client, chat(1))
        await client.close()
    assert num_requests == ([2] if first_byte else [2, 1])


async def test_all_get_their_step_at_the_same_moment() -> None:
    steps = Steps(0.02)
    order: list[str] = []

    async def wait(name: str) -> None:
        for _ in range(2):
            await steps.next()
            order.append(name)

    await asyncio.gather(*(wait(name) for name in "abc"))
    assert [{*order[:3]}, {*order[3:]}] == [{*"abc"}, {*"abc"}]


def test_no_step_comes_twice_by_a_clock_of_milliseconds() -> None:
    step_s = 0.01

    async def count() -> tuple[int, float]:
        steps, num, begin = Steps(step_s), 0, time.perf_counter()
        while num < 50:
            await steps.next()
            num += 1
        return num, time.perf_counter() - begin

    num, elapsed_s = uvloop.run(count())
    assert num <= elapsed_s / step_s + 1


def test_the_cost_of_a_process_has_that_of_those_it_started() -> None:
    burn = "import time, sys; held = bytearray(2**26)\nwhile time.process_time() < 0.1: pass\nprint(); sys.stdin.read()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-uc', {burn!r}], check=True)"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_s(process.pid) >= 0.1
        assert peak_mib(process.pid) > 64
        process.communicate()
        process.wait()


def test_the_cost_of_a_process_is_finer_than_a_tick_and_has_that_of_ended_threads_and_children() -> None:
    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    before = cpu_s(os.getpid())
    burn(0.0001)
    after = cpu_s(os.getpid())
    assert after - before >= 0.0001
    thread = threading.Thread(target=burn, args=(0.05,))
    thread.start()
    thread.join()
    assert cpu_s(os.getpid()) - after >= 0.05
    before = cpu_s(os.getpid())
    child = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", child], check=True)
    assert cpu_s(os.getpid()) - before >= 0.17  # to the tick, user and system time each


def test_what_ends_meanwhile_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment that a thread or a process is listed and the moment that it is read."""
    num_listed, read = 0, Path.read_text  # and no process has a number from 2**22 on

    def iterdir(path: Path) -> list[Path]:
        nonlocal num_listed
        num_listed += 1
        if path != Path(f"/proc/{os.getpid()}/task"):
            raise FileNotFoundError(path)  # a process that has ended
        return [path / "0", path / str(os.getpid())]  # the first one has ended

    def read_text(path: Path) -> str:
        if path.name == "children":
            return f"{2**22} {2**22 + 1}" if path.parent.name == str(os.getpid()) else read(path)
        if path.parent.name == str(2**22):
            raise ProcessLookupError(path)  # it ended after it was opened
        return read(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(Path, "read_text", read_text)
    assert cpu_s(os.getpid()) > 0
    assert peak_mib(os.getpid()) > 0
    assert num_listed == 6


def hold(url: str, num: int) -> tuple[multiprocessing.connection.Connection, asyncio.Future[None]]:
    here, there = multiprocessing.Pipe()
    return here, asyncio.ensure_future(asyncio.to_thread(hold_open, there, Endpoint("rest", url), num, 1e6))


async def test_held_streams_say_how_long_tokens_took() -> None:
    async with http_worker(step_s=0.005) as url:
        for pause_s in (0.1, 1.0, 10.0, 60.0):  # on a busy machine the clients may get `COUNT` and `END` at once
            here, held = hold(url, 3)
            assert await asyncio.to_thread(here.recv) == OPEN
            begin = time.perf_counter()
            here.send(COUNT)
            await asyncio.sleep(pause_s)
            here.send(END)
            between_s = await asyncio.to_thread(here.recv)
            await held
            if between_s:
                break
    assert 0 <= min(between_s) <= max(between_s)
    assert 0 < sum(between_s) <= 3 * (time.perf_counter() - begin)


async def test_a_held_stream_that_breaks_is_told() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        writer.close()

    async with serving(refuse) as url:
        here, held = hold(url, 1)
        assert "503: Service Unavailable" in await asyncio.to_thread(here.recv)
        await held


def test_ratios_bars_and_tables() -> None:
    results = Results()
    for system, requests, us in (("baton", 500.0, 50.0), ("vllm-router", 5000.0, 10.0)):
        figures = {"requests per CPU second": [requests], "µs per request": [1e6 / requests]}
        figures |= {"tokens per CPU second": [1e6 / us], "µs per token": [us], "events per token": [0.9]}
        results.add("cpu", figures, system=system, interface="rest", processes=1, streams=32)
    results.add("open", {"peak MiB": [700.0]}, system="baton", interface="rest", processes=1, streams=10_000)
    results.add("open", {"peak MiB": [70.0]}, system="baton", interface="rest", processes=1, streams=1000)
    results.add("ttft", {"added TTFT p50 ms": [1.0]}, system="baton", interface="grpc", processes=1)
    add_ratios(results)
    add_bars(results)
    [requests_ratio] = results.find("ratio", "requests")
    assert requests_ratio.labels == {"system": "vllm-router", "streams": 32}
    assert requests_ratio.samples.median == 10
    assert [record.samples.median for record in results.find("ratio", "tokens")] == [5]
    assert [(bar.value, bar.is_met) for bar in results.bars] == [(2000, False), (50, False), (700, True), (90, False)]
    assert "MISSED: REST, one process: tokens with an event of their own: 90.0 % (bar 97 %, 7.0 % too little)" in (
        results.bars[-1].sentence()
    )
    printed = io.StringIO()
    print_results(results, Console(width=200, file=printed), TABLES)
    text = printed.getvalue()
    assert "vllm-router" in text
    assert "1 of 4 bars met" in text


@pytest.mark.slow
def test_the_whole_of_it() -> None:
    arguments = ["--only=cpu,ttft,open", "--streams=2", "--seconds=0.3", "--tokens=8", "--open-step-ms=50"]
    command = [sys.executable, "-m", "bench.router", *arguments, "--processes=1,2", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert found["settings"]["streams"] == [2]
    assert found["failed"] == {}
    for part, quantities in (
        ("cpu", {"requests per CPU second", "tokens per CPU second", "events per token", "added TTFT p99 ms"}),
        ("ttft", {"requests per second", "events per token", "added TTFT p50 ms"}),
        ("open", {"peak MiB", "one more request p99 ms", "token late p99 ms"}),
    ):
        records = [record for record in found["records"] if record["part"] == part]
        of: dict[tuple[str, int], set[str]] = defaultdict(set)
        for record in records:
            of[record["labels"]["interface"], record["labels"]["processes"]].add(record["quantity"])
        assert {*of} == {("rest", 1), ("rest", 2), ("grpc", 1), ("grpc", 2)}
        assert all(quantities <= some for some in of.values())
