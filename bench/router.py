"""What a router costs: CPU time of its process per request and per streamed token, and what it adds to TTFT.

    python -m bench.router [--streams 1,32,1000] [--interfaces rest,grpc] [--seconds 5] [--step-ms 10] [--processes 1,2]
      [--repeats 1] [--json FILE]

One router (`baton router`) in front of one decode worker without an engine (`bench.instant_worker`), each in its own
process, with the tokenizer of the default model: prompts are templated and tokenized. The CPU time is that of the
router's process alone (with `--processes`, of all that it has), from the kernel, so other work on the machine distorts
it little. It moves with the CPU and its caches: compare figures of one machine. All gRPC streams are in one connection,
and so in one process.

- requests: one token each, at once, not streamed. tokens: streams of `--tokens` tokens, whole requests with their
  prompts. The worker gives all streams a token every `--step-ms`, in one message, as a decode step does.
- events per token: 1 if the router keeps up. If it is behind, the tokens of a client that wait are one event.
- TTFT: to the first event of those streams, less that of the worker asked directly over gRPC with as many streams. All
  streams are always busy, so with more than one it is mostly waiting for this one process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import uvloop

from bench.instant_worker import MODEL
from bench.measure import interleave, print_table, write_json
from bench.processes import running
from common.config import DEFAULT_MODEL, default_cache_dir
from common.open_files import allow_open_files
from engine.embedded_model import ensure_model
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

PROMPT = "Which of the dogs in the yard was it that the quick brown fox jumped over, and how often did it do so? " * 2
DONE = b"data: [DONE]\n\n"
TICKS = os.sysconf("SC_CLK_TCK")
WARM_UP_S = 0.5
NUM_OTHER_EVENTS = 2  # of a REST answer: the role that opens it, and the mark of its end

Ask = Callable[[int, int], Awaitable[tuple[float, int]]]
"""(stream, max_tokens) -> seconds to the first token, and events with tokens. Returns once the answer is whole."""


class Rest:
    """One connection for each stream, kept open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._connections: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def ask(self, stream: int, max_tokens: int) -> tuple[float, int]:
        if stream not in self._connections:
            self._connections[stream] = await asyncio.open_connection(*self._address)
        reader, writer = self._connections[stream]
        body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": max_tokens}
        content = json.dumps({**body, "stream": max_tokens > 1}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(content)}\r\n"
        begin = time.perf_counter()
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(f"the router answers {answer!r}")
        if max_tokens == 1:
            await reader.readexactly(int(answer.partition(b"content-length: ")[2].split(b"\r\n")[0]))
            return time.perf_counter() - begin, 1
        first, got, num = None, b"", 0
        while not got.endswith(b"0\r\n\r\n"):
            more = await reader.read(2**18)
            if not more:
                raise RuntimeError("the answer was cut off")
            first = first or time.perf_counter()
            num += more.count(b"data: ")
            got = (got + more)[-64:]
        num -= NUM_OTHER_EVENTS
        if not 0 < num <= max_tokens:
            raise RuntimeError(f"{num} events for {max_tokens} tokens")
        return (first or 0.0) - begin, num


class Grpc:
    """One channel for all streams."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_concurrent_streams", 20_000)]
        self._stub = inference_pb2_grpc.InferenceServiceStub(grpc.aio.insecure_channel(address, options))

    async def ask(self, _stream: int, max_tokens: int) -> tuple[float, int]:
        message = inference_pb2.ChatMessage(role="user", content=PROMPT)
        params = types_pb2.SamplingParams(max_tokens=max_tokens)
        begin, first, num, num_events = time.perf_counter(), 0.0, 0, 0
        async for response in self._stub.Chat(inference_pb2.ChatRequest(messages=[message], sampling_params=params)):
            first = first or time.perf_counter()
            num += len(response.token_ids)
            num_events += 1
        if num != max_tokens:
            raise RuntimeError(f"{num} tokens of {max_tokens}")
        return first - begin, num_events


class Direct:
    """The worker itself, with as many prompt tokens."""

    def __init__(self, address: str) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(grpc.aio.insecure_channel(address))

    async def ask(self, _stream: int, max_tokens: int) -> tuple[float, int]:
        params = types_pb2.SamplingParams(max_tokens=max_tokens)
        begin, first = time.perf_counter(), 0.0
        async for _ in self._stub.Decode(decode_pb2.DecodeRequest(prompt_token_ids=[1] * 50, sampling_params=params)):
            first = first or time.perf_counter()
        return first - begin, max_tokens


async def load(ask: Ask, num_streams: int, max_tokens: int, seconds: float) -> list[tuple[float, int]]:
    """What `ask` says of each request. `num_streams` requests at any time, and the last of them are waited for."""
    end = time.perf_counter() + seconds
    asked: list[tuple[float, int]] = []

    async def stream(number: int) -> None:
        while True:
            asked.append(await ask(number, max_tokens))
            if time.perf_counter() >= end:
                return

    async with asyncio.TaskGroup() as group:
        for number in range(num_streams):
            group.create_task(stream(number))
    return asked


def cpu_s(pid: int) -> float:
    """User and system time of all threads of a process, and of the processes that it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / TICKS + sum(cpu_s(int(child)) for child in children)


async def measure(ask: Ask, direct: Ask, pid: int, num_streams: int, args: argparse.Namespace) -> Mapping[str, float]:
    figures: dict[str, float] = {}
    for what, max_tokens in (("requests", 1), ("tokens", args.tokens)):
        await load(ask, num_streams, max_tokens, WARM_UP_S)
        before = cpu_s(pid)
        asked = await load(ask, num_streams, max_tokens, args.seconds)
        used = cpu_s(pid) - before
        num = len(asked) * max_tokens
        figures[f"{what} per CPU second"] = num / used
        figures[f"µs per {what[:-1]}"] = 1e6 * used / num
    alone = await load(direct, num_streams, args.tokens, args.seconds / 4)
    figures["events per token"] = sum(num_events for _, num_events in asked) / num
    for name, at in (("p50", 0.5), ("p99", 0.99)):
        figures[f"added TTFT {name}, ms"] = 1000 * (_quantile(asked, at) - _quantile(alone, at))
    return figures


def _quantile(asked: list[tuple[float, int]], at: float) -> float:
    return sorted(ttft for ttft, _ in asked)[int(at * (len(asked) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", default="1,32,1000")
    parser.add_argument("--interfaces", default="rest,grpc")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each figure")
    parser.add_argument("--processes", default="1", help="of the router, one figure for each: 1,2")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the worker: between two tokens of a stream")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    interfaces = args.interfaces.split(",")
    if not {*interfaces} <= {"rest", "grpc"}:
        parser.error("--interfaces: rest, grpc or both")
    processes = [int(number) for number in args.processes.split(",")]
    counts = [int(count) for count in args.streams.split(",")]
    allow_open_files(2 * max(counts) + 100)
    tokenizer_dir = ensure_model(DEFAULT_MODEL, default_cache_dir(), lambda text: print(text, file=sys.stderr))
    python = sys.executable
    with running([python, "-m", "bench.instant_worker", str(tokenizer_dir), str(args.step_ms)], "the worker") as worker:
        ports = ["--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0", "--log-level=warning"]
        room = [f"--max-requests={2 * max(counts)}", f"--max-connections={2 * max(counts) + 100}"]
        command = [python, "-m", "baton", "router", f"--decode={worker['grpc']}", *ports, *room]
        with contextlib.ExitStack() as stack:

            def system(router: Mapping[str, str], interface: str, count: int) -> Callable[[], Mapping[str, float]]:
                async def run() -> Mapping[str, float]:
                    asked = Rest(router["http"]) if interface == "rest" else Grpc(router["grpc"])
                    direct = Direct(worker["grpc"])
                    return await measure(asked.ask, direct.ask, int(router["pid"]), count, args)

                def in_a_loop() -> Mapping[str, float]:
                    return uvloop.run(run())

                return in_a_loop

            systems: dict[str, Callable[[], Mapping[str, float]]] = {}
            for number in processes:
                router = stack.enter_context(running([*command, f"--processes={number}"], "the router"))
                of = "" if processes == [1] else f", {number} processes"
                systems |= {
                    f"{name}, {count}{of}": system(router, name, count) for name in interfaces for count in counts
                }
            rows = interleave(systems, args.repeats)
    print_table("interface, streams", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
