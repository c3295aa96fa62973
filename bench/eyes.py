"""What it costs to see what a stack does: CPU time of a router, and of a decode worker's front, with all of it on and
with nothing.

    python -m bench.eyes

| | off | quiet | on |
| --- | --- | --- | --- |
| metrics, the last requests and decisions | calls of them do nothing | counted and kept | counted and kept |
| traces | none | one request in a hundred, sent to a collector | the same |
| log of the router | warnings | warnings | a line for each request, and for each call (`--access-log 1`) |

All run at once and are asked in turns, by the same closed loop of requests. The CPU time of a process depends little on
what else runs on the machine, but streams that are late send more tokens in one piece; so turns are short and many, and
what is told is the median of the differences within a round, and the middle half of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import uvloop
from rich.console import Console
from rich.table import Table

from baton.cli.main import main as baton
from bench.processes import running
from bench.router.clients import Endpoint
from bench.router.load import closed_loop
from bench.router.process_cost import own_cpu_s
from bench.router.systems import BATON, workers
from bench.worker_front import MAX_TOKENS, Load, serve_front
from common.config.worker import DEFAULT_MODEL, default_cache_dir
from engine.loading.embedded_model import ensure_model

SAMPLE = 0.01  # of requests that are traced
_TRACE_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
OFF, QUIET, ON = "off", "quiet", "on"
_SERVE = [sys.executable, "-m", "bench.eyes", "--serve"]
Measure = Callable[[], float]
"""Asks for some seconds; µs of the process's CPU time for a request."""


@dataclass(slots=True, frozen=True)
class _Load:
    streams: int  # requests at any time
    tokens: int  # of an answer
    seconds: float
    step_ms: int  # between two tokens of a request


def blind() -> None:
    """In this process nothing is counted or kept for people from now on."""
    from prometheus_client import Counter, Gauge, Histogram

    from router.running.decisions import Decisions
    from router.running.finished import Finished

    places: Sequence[tuple[type, tuple[str, ...]]] = (
        (Counter, ("inc",)),
        (Gauge, ("inc", "dec", "set")),
        (Histogram, ("observe",)),
        (Finished, ("add",)),
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
def routers(tokenizer_dir: Path, load: _Load, logs: Path) -> Iterator[Mapping[str, Measure]]:
    """A router of each kind before one worker; what a request over REST takes there."""
    flags = ["--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0", f"--max-requests={2 * load.streams}"]
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
            found[kind] = partial(_of_router, int(fields["pid"]), fields["http"], load)
        yield found


def _of_router(pid: int, address: str, load: _Load) -> float:
    async def run() -> int:
        client = Endpoint("rest", address).connect()
        try:
            return len(await closed_loop(client, load.streams, load.tokens, load.seconds))
        finally:
            await client.close()

    before = own_cpu_s(pid)
    num_requests = uvloop.run(run())
    return 1e6 * (own_cpu_s(pid) - before) / num_requests


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


def in_turns(measures: Mapping[str, Measure], repeats: int) -> list[dict[str, float]]:
    """Figures by kind, of `repeats` rounds after a warm-up. Each round begins with another kind."""
    rounds, kinds = [], [*measures]
    for number in range(repeats + 1):
        first = number % len(kinds)
        figures = {kind: measures[kind]() for kind in kinds[first:] + kinds[:first]}
        if number:
            rounds.append(figures)
    return rounds


def print_rounds(found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    table = Table(title="CPU time of a request, µs; differences from off: median [middle half]")
    for title in ("process", OFF, f"{QUIET} - {OFF}", f"{ON} - {OFF}"):
        table.add_column(title, justify="left" if title == "process" else "right")
    for name, rounds in found.items():
        cells = [f"{statistics.median(figures[OFF] for figures in rounds):.0f}"]
        for kind in (QUIET, ON):
            more = [figures[kind] - figures[OFF] for figures in rounds if kind in figures]
            cells.append(_cell(more) if more else "")
        table.add_row(name, *cells)
    Console(width=110).print(table)


def _cell(differences: Sequence[float]) -> str:
    if len(differences) < 2:
        return f"{differences[0]:.0f}"
    low, middle, high = statistics.quantiles(differences, n=4, method="inclusive")
    return f"{middle:.0f} [{low:.0f} … {high:.0f}]"


def _serve(what: str, arguments: Sequence[str]) -> int:
    if what.startswith("blind"):
        blind()
    if what == "blind-router":
        return baton(arguments)
    step_ms, *spans = arguments
    settings = {"log_level": "warning"} if what == "blind-front" else {"trace_endpoint": spans[0]}
    uvloop.run(serve_front(int(step_ms), **settings))
    return 0


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return _serve(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(prog="python -m bench.eyes", description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16, help=f"of an answer, at most {MAX_TOKENS}")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--step-ms", type=int, default=10, help="between two tokens of a request")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if not 1 <= args.tokens <= MAX_TOKENS:
        parser.error(f"--tokens: must be from 1 to {MAX_TOKENS}")
    load = _Load(args.streams, args.tokens, args.seconds, args.step_ms)
    tokenizer_dir = ensure_model(DEFAULT_MODEL, default_cache_dir(), lambda line: print(line, file=sys.stderr))
    found = {}
    with tempfile.TemporaryDirectory() as logs:
        with routers(tokenizer_dir, load, Path(logs)) as measures:
            found["router, REST"] = in_turns(measures, args.repeats)
        with fronts(load, Path(logs)) as measures:
            found["decode worker's front"] = in_turns(measures, args.repeats)
    print_rounds(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
