"""`baton bench`, which the `baton` command finds through an entry point. What a command needs beyond its flags is
imported when it runs: a router's image, which has no torch, can still send a load."""

from __future__ import annotations

import click

from bench.kv.command import kv
from bench.offline import LATENCY, THROUGHPUT
from bench.router.command import router
from bench.serving.command import serve
from bench.serving.compare import compare_command
from bench.serving.sweep import sweep


@click.group("bench", short_help="Measures Baton, and other servers beside it.")
def BENCH() -> None:  # noqa: N802 - what the entry point names
    """Measures Baton on this machine, and any server with OpenAI's API. Figures mean something only if nothing else
    runs."""


for _command in (serve, sweep, compare_command, LATENCY, THROUGHPUT, kv, router):
    BENCH.add_command(_command)
