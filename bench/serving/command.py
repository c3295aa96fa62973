"""`baton bench serve`: sends a load to an endpoint, and says how it was answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import uvloop

from bench.command_line import outcome
from bench.serving.options import ABOVE_0, AS_JSON, OUTPUT, above_0, load_options, read_options, url_of


@click.command(
    "serve",
    short_help="Load on an endpoint: latencies, throughput, goodput.",
    context_settings={"max_content_width": 110},
)
@click.option("--base-url", metavar="URL", help="http://127.0.0.1:8000, or 127.0.0.1:50051 for baton.v1, if unset")
@click.option("--label", metavar="TEXT", default="", help="name of the endpoint in reports")
@load_options
@click.option(
    "--request-rate",
    metavar="FLOAT",
    callback=above_0,
    default="inf",
    show_default=True,
    help="requests per second; inf: when a trace has them, else all at once",
)
@click.option(
    "--max-concurrency",
    "--users",
    metavar="INT",
    type=click.IntRange(min=1),
    help="requests at a time; without a rate, so many users send one after another (closed loop)",
)
@click.option(
    "--ramp-up-strategy",
    type=click.Choice(["linear", "exponential"]),
    help="the rate changes over the run, and is not --request-rate",
)
@click.option("--ramp-up-start-rps", metavar="FLOAT", type=ABOVE_0)
@click.option("--ramp-up-end-rps", metavar="FLOAT", type=ABOVE_0)
@click.option("--find-rate", is_flag=True, help="search for the highest rate at which the targets of --goodput hold")
@click.option(
    "--good-fraction",
    metavar="FLOAT",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.99,
    show_default=True,
    help="of requests that have to meet the targets in that search",
)
@click.option(
    "--tolerance",
    metavar="FLOAT",
    type=click.FloatRange(min=0.001, max=1),
    default=0.05,
    show_default=True,
    help="of the rate that is found, as a share of it",
)
@OUTPUT
@AS_JSON
@click.option("--save-detailed", is_flag=True, help="JSON has lists with the times of each request")
def serve(
    base_url: str | None, label: str, as_json: bool, save_detailed: bool, output: tuple[str, ...], **given: Any
) -> int:
    """Sends a load to an endpoint, and says how it was answered: TTFT, TPOT, ITL and E2E percentiles, throughput, and
    goodput under --goodput.

    Arrivals are fixed before the run. Times count from when a request was due, so an endpoint that slows the client
    down gains nothing by it. If the client was the bottleneck, the run is invalid and the exit code is 1.

    \b
    Examples:
      baton bench serve --request-rate 4 --num-prompts 200 --goodput ttft:500 tpot:50
      baton bench serve --users 16 --random-input-len 256 -o run.html -o run.json
      baton bench serve --backend baton --dataset-name mooncake --dataset-path trace.jsonl
      baton bench serve --find-rate --request-rate 1 --duration 60 --goodput ttft:500 tpot:50
    """

    def run() -> int:
        from bench.serving.serve import Serve, run_serve

        options = read_options(given)
        target = replace(options.target, name=label, url=url_of(base_url, options.target.backend))
        asked = Serve(
            options=replace(options, target=target),
            outputs=output,
            as_json=as_json,
            is_detailed=save_detailed,
            finds_rate=given["find_rate"],
            good_fraction=given["good_fraction"],
            tolerance=given["tolerance"],
        )
        return uvloop.run(run_serve(asked))

    return outcome("serve", run)
