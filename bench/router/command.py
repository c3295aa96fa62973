"""`baton bench router`; also `python -m bench.router`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from bench.command_line import names, outcome
from bench.kv.results import Results
from bench.kv.settings import show_progress

if TYPE_CHECKING:
    from bench.router.parts import RouterBench

PARTS = ("cpu", "ttft", "open")
INTERFACES = ("rest", "grpc")


def _counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:  # noqa: ARG001
    try:
        counts = tuple(int(text) for text in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not numbers with commas between them") from error
    if min(counts) < 1:
        raise click.BadParameter(f"{min(counts)} is below 1")
    return counts


def _words(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:  # noqa: ARG001
    return tuple(word.strip() for word in value.split(",") if word.strip())


_ABOVE_0 = click.FloatRange(min=0, min_open=True)


@click.command(
    "router", short_help="What a router costs, and what it adds to TTFT.", context_settings={"max_content_width": 100}
)
@click.option(
    "--only",
    metavar="PART,PART",
    callback=names(PARTS),
    default="cpu,ttft",
    show_default=True,
    help=f"of {', '.join(PARTS)}",
)
@click.option(
    "--streams", metavar="INT,INT", callback=_counts, default="1,32,1000", show_default=True, help="at a time"
)
@click.option("--interfaces", metavar="NAME,NAME", callback=names(INTERFACES), help="of " + ", ".join(INTERFACES))
@click.option("--processes", metavar="INT,INT", callback=_counts, default="1", show_default=True, help="of the router")
@click.option(
    "--peers",
    metavar="NAME[=PATH],…",
    callback=_words,
    default="",
    help="other routers beside it, and their commands: vllm-router, sglang-router",
)
@click.option("--tokens", metavar="INT", type=click.IntRange(min=2), default=256, show_default=True, help="of a stream")
@click.option("--seconds", metavar="FLOAT", type=_ABOVE_0, default=5.0, show_default=True, help="of each figure")
@click.option(
    "--step-ms", metavar="FLOAT", type=_ABOVE_0, default=10.0, show_default=True, help="between two tokens of a stream"
)
@click.option(
    "--open-step-ms",
    metavar="FLOAT",
    type=_ABOVE_0,
    default=4000.0,
    show_default=True,
    help="likewise, in the part open",
)
@click.option(
    "--rate",
    metavar="FLOAT",
    type=_ABOVE_0,
    help="requests per second in the part ttft; half of what a CPU second serves if unset",
)
@click.option("--repeats", metavar="INT", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object, with every sample")
def router(
    only: tuple[str, ...],
    streams: tuple[int, ...],
    interfaces: tuple[str, ...],
    processes: tuple[int, ...],
    peers: tuple[str, ...],
    tokens: int,
    seconds: float,
    step_ms: float,
    open_step_ms: float,
    rate: float | None,
    repeats: int,
    as_json: bool,
) -> int:
    """Measures what a router costs, before workers without an engine that give a first token at once and then one a
    step. Router, workers and clients are processes of their own, on one machine.

    \b
      cpu    CPU time of the router's processes per request of one token, and per token of a stream, all streams
             always busy; what is added to TTFT then is mostly waiting
      ttft   what is added to TTFT at half load: requests come at random, half as many as a CPU second serves
      open   streams that stay open: the router's memory, how long one more request takes, how late tokens come

    Prompts are templated and tokenized by Baton; its peers pass text on, from workers that speak HTTP.

    \b
    Examples:
      baton bench router --streams 32 --processes 1,2
      baton bench router --interfaces rest --peers vllm-router=/opt/vllm-router/bin/vllm-router
      baton bench router --only open --streams 10000 --interfaces rest
    """

    def run() -> int:
        from bench.router.parts import RouterBench, run_parts
        from bench.router.systems import find_peers

        bench = RouterBench(
            parts=only,
            streams=streams,
            interfaces=interfaces,
            processes=processes,
            peers=find_peers(peers),
            tokens=tokens,
            seconds=seconds,
            step_ms=step_ms,
            open_step_ms=open_step_ms,
            rate=rate,
            repeats=repeats,
        )
        results = Results()
        run_parts(bench, results, show_progress)
        _print(bench, results, as_json=as_json)
        return 1 if results.failed else 0

    return outcome("router", run)


def _print(bench: RouterBench, results: Results, *, as_json: bool) -> None:
    from bench.kv.machine import describe_machine, versions
    from bench.kv.report import print_results
    from bench.router.parts import TABLES

    machine = describe_machine()
    if as_json:
        whole = {"machine": machine, "versions": versions(), "settings": asdict(bench), **results.as_json()}
        print(json.dumps(whole, ensure_ascii=False))
    else:
        print(f"{machine['cpu']}, {machine['usable_cores']} cores")
        print_results(results, tables=TABLES)
