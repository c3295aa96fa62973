"""`baton simulate`: what a fleet would do with a traffic, on a virtual clock."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from baton.cli.options import AS_JSON, SettingsCommand
from baton.settings import SIMULATE_SETTINGS
from common.config import SimulateSettings
from common.errors import StartupError
from common.goodput import Goodput, parse_goodput

if TYPE_CHECKING:
    from simulation.scenario import Result

COLUMNS = (
    ("TTFT p50", "p50_ttft_ms", "{:.0f} ms"),
    ("p99", "p99_ttft_ms", "{:.0f} ms"),
    ("TPOT p50", "p50_tpot_ms", "{:.1f} ms"),
    ("p99", "p99_tpot_ms", "{:.1f} ms"),
    ("E2E p50", "p50_e2el_ms", "{:.0f} ms"),
    ("tokens/s", "output_throughput", "{:.0f}"),
    ("good", "good_share", "{:.1%}"),
    ("cached", "cached_share", "{:.1%}"),
    ("in place", "in_place_share", "{:.1%}"),
    ("moved", "transferred_gb", "{:.1f} GB"),
    ("worker hours", "worker_hours", "{:.3f}"),
    ("good/worker hour", "good_requests_per_worker_hour", "{:.0f}"),
)
"""Heading, figure, and how it is written."""
TENANT_COLUMNS = (
    ("requests", "requests", "{:.0f}"),
    ("failed", "failed", "{:.0f}"),
    ("tokens", "output_token_share", "{:.1%}"),
    ("queue p50", "p50_queue_ms", "{:.0f} ms"),
    ("p99", "p99_queue_ms", "{:.0f} ms"),
    ("TTFT p50", "p50_ttft_ms", "{:.0f} ms"),
    ("p99", "p99_ttft_ms", "{:.0f} ms"),
    ("good", "good_share", "{:.1%}"),
)
"""The same, of `Outcome.by_tenant`."""


def simulate(settings: SimulateSettings, *, targets: tuple[str, ...], as_json: bool) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from simulation.report import page
    from simulation.scenario import run

    settings = settings.model_copy(update={"goodput": (*settings.goodput, *targets)})
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar, undisturbed():
        task = bar.add_task("requests", total=None)
        results = run(settings, lambda done, num: bar.update(task, completed=done, total=num))
    if settings.out is not None:
        try:
            Path(settings.out).write_text(page(results, parse_goodput(settings.goodput, "goodput")), encoding="utf-8")
        except OSError as error:
            raise StartupError(f"{settings.out} cannot be written: {error.strerror}") from error
    if as_json:
        goodput = parse_goodput(settings.goodput, "goodput")
        click.echo(json.dumps([_as_json(one, goodput) for one in results], indent=1))
        return 0
    _print_table(results)
    if settings.tenants is not None:
        _print_tenants(results, parse_goodput(settings.goodput, "goodput"))
    for one in results:
        for reason, number in one.outcome.failures().items():
            click.echo(f"{one.scenario.policy}, {one.scenario.fleet}: {number} requests failed: {reason}")
    for source in dict.fromkeys(source for one in results for source in one.sources):
        click.echo(f"times: {source}")
    if settings.out is not None:
        click.echo(f"report: {settings.out}")
    return 0


@contextmanager
def undisturbed() -> Iterator[None]:
    """For simulations: garbage is looked for rarely, and engines log errors alone."""
    # A fleet has millions of objects that last, and hardly any cycles: to look for them took a fifth of the time.
    before = gc.get_threshold()
    gc.set_threshold(100_000)
    # Preemptions are counted; each is a line in a real worker's log.
    engine = logging.getLogger("engine")
    level = engine.level
    engine.setLevel(logging.ERROR)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        engine.setLevel(level)


def _as_json(result: Result, goodput: Goodput) -> dict[str, object]:
    tenants = result.outcome.by_tenant(goodput)
    workers = {role.value: num for role, num in result.scenario.num_workers.items()}
    return {
        "policy": result.scenario.policy,
        "workers": workers,
        **result.figures,
        "failures": result.outcome.failures(),
        **({"tenants": tenants} if tenants else {}),
    }


def _print_table(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("policy", "fleet", "served"):
        table.add_column(name)
    for name, _, _ in COLUMNS:
        table.add_column(name, justify="right")
    for one in results:
        figures = one.figures
        served = f"{figures['requests'] - figures['failed']:.0f} of {figures['requests']:.0f}"
        cells = [form.format(figures[name]) if name in figures else "" for _, name, form in COLUMNS]
        table.add_row(one.scenario.policy, one.scenario.fleet, served, *cells)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def _print_tenants(results: Sequence[Result], goodput: Goodput) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("policy", "fleet", "tenant"):
        table.add_column(name)
    for name, _, _ in TENANT_COLUMNS:
        table.add_column(name, justify="right")
    for one in results:
        for tenant, figures in one.outcome.by_tenant(goodput).items():
            cells = [form.format(figures[name]) if name in figures else "" for _, name, form in TENANT_COLUMNS]
            table.add_row(one.scenario.policy, one.scenario.fleet, tenant, *cells)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


SIMULATE = SettingsCommand(
    "simulate",
    SIMULATE_SETTINGS,
    simulate,
    about="Plays a traffic to a fleet that is not there: real routing and scheduling, on a virtual clock.",
    examples=[
        "baton simulate --prefill 2 --decode 2 --rate 8 --goodput ttft:500 tpot:50",
        "baton simulate --trace conversation.jsonl --policy least_load,prefix_aware --out report.html",
        "baton simulate --rate 16 --sweep prefill=1..4,decode=1..4 --goodput ttft:500,tpot:50",
        "baton simulate --arrivals day --rate 12 --requests 20000 --autoscale --leap",
        "baton simulate --prefill 400 --decode 600 --rate 4000 --requests 100000 --block-size 512 --counted",
    ],
    params=[click.Argument(["targets"], nargs=-1, metavar="[TARGET]..."), AS_JSON],
)
