"""What it costs to see what a stack does: CPU time of a router, and of a decode worker's front, with all of it on and
with nothing.

    python -m bench.eyes              # what it takes of processes' CPU time
    python -m bench.eyes --users      # what users notice, on an idle machine: first tokens' times, and throughput

| | off | quiet | on |
| --- | --- | --- | --- |
| metrics, the last requests and decisions | calls of them do nothing | counted and kept | counted and kept |
| traces | none | one request in a hundred, sent to a collector | the same |
| log of the router | warnings | warnings | a line for each request, and for each call (`--access-log 1`) |

All run at once and are asked in turns, by the same closed loop of requests. The CPU time of a process depends little on
what else runs on the machine, but streams that are late send more tokens in one piece; so turns are short and many, and
what is told is the median of the differences within a round, and the middle half of them.

Before that, what single parts take of a router's event loop: CPU time of this thread, the least of some repeats.

With `--users`, by the clock: the time to first token at half load, which is half as many requests a second as client,
router and worker serve together on this machine, from the same three routers; and the answers a second of four real
stacks of the default model, two with all of it, two as they are without flags, by a closed loop of `--streams`
requests of new prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import uvloop
from rich.console import Console
from rich.table import Table

from baton.cli.main import main as baton
from bench.load import loops
from bench.load.clients import Asked, Client, GrpcClient, Request, ask
from bench.processes import running, running_stack
from bench.router.clients import Endpoint
from bench.router.load import closed_loop, open_loop
from bench.router.process_cost import own_cpu_s
from bench.router.systems import BATON, workers
from bench.worker_front import MAX_TOKENS, Load, serve_front
from common.config.worker import DEFAULT_MODEL, default_cache_dir
from common.logs import TextFormatter
from common.sampling import SamplingParams
from common.tracing import Span, SpanSink, TraceContext, Traced, new_span_id, new_trace_id
from common.types import FinishReason
from engine.loading.embedded_model import ensure_model
from protos.baton.v1 import types_pb2
from router.api.access_log import AccessLog
from router.fleet.served_model import ServedModel
from router.running.request import Attempt, GenerationRequest, Progress
from router.serving.endings import Endings

SAMPLE = 0.01  # of requests that are traced
_TRACE_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
OFF, QUIET, ON = "off", "quiet", "on"
OFF_TWIN, ON_TWIN = "off, the second", "on, the second"
_SERVE = [sys.executable, "-m", "bench.eyes", "--serve"]
Measure = Callable[[], float]
"""Asks for some seconds; µs of the process's CPU time for a request, or what `--users` tells."""
_HALF_LOAD_TURN_S = 2.0
_FULL_LOAD_STREAMS = 256
_THROUGHPUT_TURN_S = 10.0
_PROMPT_TOKENS, _ANSWER_TOKENS = 128, 64  # of the real stacks' requests


@dataclass(slots=True, frozen=True)
class _Load:
    streams: int  # requests at any time
    tokens: int  # of an answer
    seconds: float
    step_ms: int  # between two tokens of a request


@dataclass(slots=True, frozen=True)
class _Router:
    pid: int
    address: str  # for REST


def blind() -> None:
    """In this process nothing is counted or kept for people from now on."""
    from prometheus_client import Counter, Gauge, Histogram

    from router.running.decisions import Decisions
    from router.running.known_requests import KnownRequests

    places: Sequence[tuple[type, tuple[str, ...]]] = (
        (Counter, ("inc",)),
        (Gauge, ("inc", "dec", "set")),
        (Histogram, ("observe",)),
        (KnownRequests, ("began", "left", "ended")),
        (Decisions, ("add",)),
    )
    for place, names in places:
        for name in names:
            setattr(place, name, _do_nothing)


def _do_nothing(*_arguments: Any, **_options: Any) -> None:
    pass


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Takes spans and forgets them; its address, for OTLP over gRPC."""

    class Swallow(grpc.GenericRpcHandler):
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
            known = call.method == _TRACE_EXPORT
            return grpc.unary_unary_rpc_method_handler(lambda _spans, _context: b"") if known else None

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Swallow()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


@contextlib.contextmanager
def routers(tokenizer_dir: Path, load: _Load, logs: Path) -> Iterator[Mapping[str, _Router]]:
    """A router of each kind before one worker."""
    flags = ["--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0", f"--max-requests={32 * load.streams}"]
    with contextlib.ExitStack() as stack:
        spans = stack.enter_context(collector())
        worker = stack.enter_context(workers(BATON, tokenizer_dir, load.step_ms, 1))[0]
        flags += [f"--decode={worker.address}"]
        traced, unlogged = [f"--trace-endpoint={spans}", f"--trace-sample={SAMPLE}"], ["--log-level=warning"]
        router = [sys.executable, "-m", "baton", "router", *flags]
        commands = {
            OFF: [*_SERVE, "blind-router", "router", *flags, *unlogged],
            QUIET: [*router, *traced, *unlogged],
            ON: [*router, *traced, "--access-log=1"],
        }
        found = {}
        for kind, command in commands.items():
            log = stack.enter_context((logs / f"router-{kind}").open("wb"))
            fields = stack.enter_context(running(command, f"the router ({kind})", log))
            found[kind] = _Router(int(fields["pid"]), fields["http"])
        yield found


def _asked(router: _Router, requests: Callable[[Client], Coroutine[Any, Any, list[Asked]]]) -> list[Asked]:
    """What became of requests over REST, by a client of their own."""

    async def run() -> list[Asked]:
        client = Endpoint("rest", router.address).connect()
        try:
            return await requests(client)
        finally:
            await client.close()

    return uvloop.run(run())


def _of_router(router: _Router, load: _Load) -> float:
    before = own_cpu_s(router.pid)
    asked = _asked(router, lambda client: closed_loop(client, load.streams, load.tokens, load.seconds))
    return 1e6 * (own_cpu_s(router.pid) - before) / len(asked)


def _served_in_a_second(router: _Router, load: _Load) -> float:
    """Requests, if there are always more of them than the processes can serve."""
    start = time.perf_counter()
    asked = _asked(router, lambda client: closed_loop(client, _FULL_LOAD_STREAMS, load.tokens, _HALF_LOAD_TURN_S))
    return len(asked) / (time.perf_counter() - start)


def _first_token(router: _Router, load: _Load, rate: float) -> float:
    """Median time to first token over REST, µs, of one turn."""
    asked = _asked(router, lambda client: open_loop(client, rate, load.tokens, _HALF_LOAD_TURN_S))
    return 1e6 * statistics.median(one.ttft_s for one in asked)


@contextlib.contextmanager
def stacks(streams: int) -> Iterator[Mapping[str, Measure]]:
    """Two real stacks without and two with all of it; answers a second. Two equal ones differ by the luck of their
    start (where their memory is, what they learned of their steps), so their difference is told, too.
    """
    with contextlib.ExitStack() as stack:
        spans = stack.enter_context(collector())
        traced = [f"--trace-endpoint={spans}", f"--trace-sample={SAMPLE}", "--access-log=1", "--log-level=info"]
        yield {
            kind: partial(_answers_a_second, stack.enter_context(running_stack(flags)), streams)
            for kind, flags in {OFF: [], ON: traced, OFF_TWIN: [], ON_TWIN: traced}.items()
        }


def of_twins(rounds: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The mean of each two; `OFF_TWIN` is `OFF` and what its twin has more."""
    return [
        {
            OFF: (one[OFF] + one[OFF_TWIN]) / 2,
            ON: (one[ON] + one[ON_TWIN]) / 2,
            OFF_TWIN: (one[OFF] + one[OFF_TWIN]) / 2 + one[OFF_TWIN] - one[OFF],
        }
        for one in rounds
    ]


def _answers_a_second(address: str, streams: int) -> float:
    prompts = random.Random(time.monotonic())
    options: Mapping[str, float | bool] = {"temperature": 0.0, "ignore_eos": True}

    async def run() -> float:
        client = GrpcClient(address)

        def one(_: int) -> Coroutine[Any, Any, Asked]:
            prompt = [prompts.randrange(1000, 40_000) for _ in range(_PROMPT_TOKENS)]
            return ask(client, Request(prompt=prompt, max_tokens=_ANSWER_TOKENS, options=options))

        try:
            start = time.perf_counter()
            answers = await loops.closed_loop(streams, _THROUGHPUT_TURN_S, one)
            return len(answers) / (time.perf_counter() - start)
        finally:
            await client.close()

    return uvloop.run(run())


@contextlib.contextmanager
def fronts(load: _Load, logs: Path) -> Iterator[Mapping[str, Measure]]:
    """A decode worker's front of each kind before an engine with a simulated device."""
    with contextlib.ExitStack() as stack:
        spans = stack.enter_context(collector())
        found, step_ms = {}, str(load.step_ms)
        for kind, command in {OFF: ["blind-front", step_ms], QUIET: ["front", step_ms, spans]}.items():
            log = stack.enter_context((logs / f"front-{kind}").open("wb"))
            fields = stack.enter_context(running([*_SERVE, *command], f"the worker ({kind})", log))
            traced_share = 0.0 if kind == OFF else SAMPLE
            found[kind] = partial(_of_front, int(fields["pid"]), fields["grpc"], traced_share, load)
        yield found


def _of_front(pid: int, address: str, traced_share: float, load: _Load) -> float:
    asked, before = Load(load.streams, load.tokens, load.seconds, traced_share), own_cpu_s(pid)
    uvloop.run(asked.run(address))
    return 1e6 * (own_cpu_s(pid) - before) / asked.num_requests


def parts(repeats: int = 15, calls: int = 200) -> dict[str, float]:
    """µs of CPU time that a router's event loop takes to tell of one request."""
    model, params = SimpleNamespace(limits=SimpleNamespace(model="a-model")), SamplingParams(max_tokens=64)
    now = time.monotonic()
    request = GenerationRequest(
        request_id="0123456789abcdef0123456789abcdef",
        model=cast("ServedModel", model),
        prompt_token_ids=[1] * 200,
        sampling_params=params,
        arrived_at=now,
        deadline=now + 600,
    )
    traced = replace(request, traced=Traced(TraceContext(new_trace_id(), new_span_id())))
    access = AccessLog(1.0)

    def least(tell: Callable[[Progress], None]) -> float:
        best = math.inf
        for _ in range(repeats):
            made = [_progress(now) for _ in range(calls)]
            start = time.thread_time()
            for progress in made:
                tell(progress)
            best = min(best, time.thread_time() - start)
        return 1e6 * best / calls

    def ending(endings: Endings, of: GenerationRequest) -> Callable[[Progress], None]:
        return lambda progress: endings.answered(of, progress, FinishReason.LENGTH)

    def sent(spans: Sequence[Span]) -> None:
        """The exporter's own thread does the rest."""

    with contextlib.ExitStack() as stack:
        root, kept = logging.getLogger(), logging.getLogger().level
        file = stack.enter_context(tempfile.TemporaryFile("w"))  # each line is a write of its own, as to standard error
        handler = logging.StreamHandler(file)
        handler.setFormatter(TextFormatter("router"))
        root.addHandler(handler)
        stack.callback(root.setLevel, kept)
        stack.callback(root.removeHandler, handler)
        root.setLevel(logging.WARNING)
        quiet = least(ending(Endings(), request))
        of_traced = least(ending(Endings(spans=cast("SpanSink", SimpleNamespace(export=sent))), traced))
        root.setLevel(logging.INFO)
        line = least(ending(Endings(), request))
        call = least(lambda _: access.ended("rest", "POST /v1/chat/completions", "200", time.monotonic()))
    return {
        "metrics, and the ring of the last requests": quiet,
        "its line in the log": line - quiet,
        "the line of its call (--access-log)": call,
        "spans, of a request that is sampled": of_traced - quiet,
    }


def _progress(now: float) -> Progress:
    timings = types_pb2.Timings(queue_ms=3, prefill_queue_ms=2, prefill_ms=100, handoff_ms=10, first_decode_ms=5)
    report = types_pb2.RequestReport(timings=timings, decode_worker="10.0.0.1:50061", prefill_worker="10.0.0.2:50061")
    return Progress(
        report=report,
        queued_at=now,
        turn_at=now,
        first_token_at=now,
        last_token_at=now,
        num_output_tokens=64,
        attempts=[Attempt("new", "10.0.0.1:50061", now, first_token_at=now)],
    )


def print_parts(found: Mapping[str, float]) -> None:
    table = Table(title="CPU time of a router's event loop for each request, µs")
    table.add_column("part")
    table.add_column("µs", justify="right")
    for name, cost_us in found.items():
        table.add_row(name, f"{cost_us:.0f}")
    Console(width=110).print(table)


def in_turns(measures: Mapping[str, Measure], repeats: int) -> list[dict[str, float]]:
    """Figures by kind, of `repeats` rounds after a warm-up. Each round begins with another kind."""
    rounds, kinds = [], [*measures]
    for number in range(repeats + 1):
        first = number % len(kinds)
        figures = {kind: measures[kind]() for kind in kinds[first:] + kinds[:first]}
        if number:
            rounds.append(figures)
    return rounds


def print_rounds(title: str, rounds: Sequence[Mapping[str, float]]) -> None:
    table = Table(title=f"{title}: medians [middle half]")
    table.add_column("")
    table.add_column("of it", justify="right")
    table.add_column(f"more than {OFF}", justify="right")
    for kind in (OFF, QUIET, ON, OFF_TWIN):
        figures = [one[kind] for one in rounds if kind in one]
        if figures:
            more = "" if kind == OFF else _cell([one[kind] - one[OFF] for one in rounds])
            table.add_row(kind, _cell(figures), more)
    Console(width=110).print(table)


def _cell(figures: Sequence[float]) -> str:
    if len(figures) < 2:
        return f"{figures[0]:.4g}"
    return "{1:.4g} [{0:.4g} … {2:.4g}]".format(*statistics.quantiles(figures, n=4, method="inclusive"))


def _serve(what: str, arguments: Sequence[str]) -> int:
    if what.startswith("blind"):
        blind()
    if what == "blind-router":
        return baton(arguments)
    step_ms, *spans = arguments
    settings = {"log_level": "warning"} if what == "blind-front" else {"trace_endpoint": spans[0]}
    uvloop.run(serve_front(int(step_ms), **settings))
    return 0


def of_processes(tokenizer_dir: Path, load: _Load, logs: Path, repeats: int) -> None:
    print_parts(parts())
    with routers(tokenizer_dir, load, logs) as found:
        measures = {kind: partial(_of_router, router, load) for kind, router in found.items()}
        print_rounds("CPU time of a router, over REST, µs for each request", in_turns(measures, repeats))
    with fronts(load, logs) as of_fronts:
        print_rounds("CPU time of a decode worker's front, µs for each request", in_turns(of_fronts, repeats))


def of_users(tokenizer_dir: Path, load: _Load, logs: Path, repeats: int) -> None:
    with routers(tokenizer_dir, load, logs) as found:
        rate = 0.5 * statistics.median(_served_in_a_second(found[OFF], load) for _ in range(5))
        measures = {kind: partial(_first_token, router, load, rate) for kind, router in found.items()}
        print_rounds(f"time to first token over REST at {rate:.0f} requests a second, µs", in_turns(measures, repeats))
    with stacks(load.streams) as of_stacks:
        rounds = of_twins(in_turns(of_stacks, max(repeats // 3, 2)))
        print_rounds("answers of a real stack, in a second", rounds)


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return _serve(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(prog="python -m bench.eyes", description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16, help=f"of an answer, at most {MAX_TOKENS}")
    parser.add_argument("--seconds", type=float, default=0.25, help="of each turn")
    parser.add_argument("--step-ms", type=int, default=10, help="between two tokens of a request")
    parser.add_argument("--repeats", type=int, help="100; with --users 30 and, of the stacks, a third of that")
    parser.add_argument("--users", action="store_true", help="times and throughput, not CPU time")
    args = parser.parse_args()
    if not 1 <= args.tokens <= MAX_TOKENS:
        parser.error(f"--tokens: must be from 1 to {MAX_TOKENS}")
    load = _Load(args.streams, args.tokens, args.seconds, args.step_ms)
    tokenizer_dir = ensure_model(DEFAULT_MODEL, default_cache_dir(), lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory() as logs:
        if args.users:
            of_users(tokenizer_dir, load, Path(logs), args.repeats or 30)
        else:
            of_processes(tokenizer_dir, load, Path(logs), args.repeats or 100)
    return 0


if __name__ == "__main__":
    sys.exit(main())
