"""What a run shows in a terminal: a progress bar, then tables."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from bench.serving.figures import Figures, Json
from bench.serving.outcome import Ending, Outcome
from bench.serving.page import LATENCY_COLUMNS, error_rows, latency_rows, summary_rows
from bench.serving.run import Progress


@contextlib.contextmanager
def progress_bar(what: str, num: int) -> Iterator[Progress]:
    """On standard error, if that is a terminal."""
    endings: Counter[Ending] = Counter()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task(what, total=num)

        def ended(outcome: Outcome) -> None:
            endings[outcome.ending] += 1
            others = [f"{count} {ending}" for ending, count in endings.items() if ending is not Ending.COMPLETED]
            bars.update(task, advance=1, description=", ".join([what, *others]))

        yield ended


def print_run(settings: Mapping[str, Json], made: Figures, console: Console | None = None) -> None:
    console = console or Console()
    model, address = escape(str(settings["model_id"])), escape(str(settings["base_url"]))
    console.print(f"[bold]{model}[/bold] at {address} ({settings['backend']})", highlight=False)
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    for name, value in summary_rows(made):
        table.add_row(name, value)
    console.print(table)
    latencies = Table("milliseconds", box=None)
    for column in LATENCY_COLUMNS:
        latencies.add_column(column, justify="right", no_wrap=True)
    for name, values in latency_rows(made):
        latencies.add_row(name, *values)
    console.print(latencies)
    for count, reason in error_rows(made):
        console.print(f"{count} did not complete: {reason}", highlight=False, markup=False)
    print_validity(made, console)


def print_validity(made: Figures, console: Console) -> None:
    reasons = made.get("invalid_reasons")
    if isinstance(reasons, list) and reasons:
        console.print("[red]invalid: the client was the bottleneck[/red]")
        for reason in reasons:
            console.print(f"  {reason}", highlight=False, markup=False)
