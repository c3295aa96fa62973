"""A run on a terminal: one table a part, then every bar in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bench.kv.results import Record, Results, Samples

Tables = Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]]
"""Part: title, labels that name a row, quantities shown."""

TABLES: Tables = {
    "handoff": (
        "Handoff of a prompt's blocks, process to process",
        ("shape", "block_size", "system"),
        ("GB/s", "fetch ms", "publish ms", "fetch, % over raw", "whole, % over raw"),
    ),
    "exposed": (
        "From first to second token, less one decode step",
        ("connector", "length", "mode"),
        ("TTFT ms", "exposed ms", "% of TTFT", "handoff ms", "transfer ms", "decode step ms"),
    ),
    "orchestration": ("Handoff less transfer", ("connector",), ("orchestration ms",)),
    "control": (
        "Control plane, by number of blocks",
        ("connector", "path", "stage", "num_blocks"),
        ("µs per block", "µs per request", "handoff less transfer ms", "release ms"),
    ),
    "store": (
        "Time to first token on new workers, prompt in the store or not",
        ("connector", "length"),
        ("hit TTFT ms", "recompute TTFT ms", "speed-up", "MB read"),
    ),
    "colocated": (
        "Chat requests beside long prompts, equal cores",
        ("system",),
        ("TTFT ms", "ITL ms", "long prompts' TTFT ms"),
    ),
}
WITH_TAIL = ("colocated", "orchestration")  # p50 and p99 instead of median and quartiles


def print_results(results: Results, console: Console | None = None, tables: Tables = TABLES) -> None:
    console = console or Console(width=150)
    for part in tables:
        if any(record.part == part for record in results.records):
            what = "p50 / p99" if part in WITH_TAIL else "median [quartiles]"
            console.print(f"\n{tables[part][0]}: {what}", markup=False, highlight=False)
            console.print(table(results, part, tables))
    for what, why in results.skipped.items():
        console.print(f"skipped: {what}: {why}", markup=False, highlight=False)
    for part, why in results.failed.items():
        console.print(f"FAILED: {part}: {why}", markup=False, highlight=False)
    for bar in results.bars:
        console.print(bar.sentence(), markup=False, highlight=False, soft_wrap=True)
    num_met = sum(bar.is_met for bar in results.bars)
    if results.bars:
        console.print(f"{num_met} of {len(results.bars)} bars met", highlight=False)


def table(results: Results, part: str, tables: Tables = TABLES) -> Table:
    """A row for each set of labels, in the order of measuring."""
    _, names, quantities = tables[part]
    records = [record for record in results.records if record.part == part]
    shown_names = [name for name in names if any(name in record.labels for record in records)]
    shown = [quantity for quantity in quantities if any(record.quantity == quantity for record in records)]
    made = Table()
    for name in shown_names:
        made.add_column(name.replace("_", " "))
    for quantity in shown:
        made.add_column(quantity, justify="right")
    for key in dict.fromkeys(_key(record, shown_names) for record in records):
        row = {record.quantity: record.samples for record in records if _key(record, shown_names) == key}
        if any(quantity in row for quantity in shown):
            made.add_row(*key, *(cell(row.get(quantity), tail=part in WITH_TAIL) for quantity in shown))
    return made


def _key(record: Record, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(record.labels.get(name, "")) for name in names)


def cell(samples: Samples | None, *, tail: bool) -> str:
    if samples is None:
        return ""
    if tail:
        return f"{_number(samples.median)} / {_number(samples.percentile(0.99))}"
    if len(samples.values) == 1:
        return _number(samples.median)
    low, high = samples.percentile(0.25), samples.percentile(0.75)
    return f"{_number(samples.median)} \\[{_number(low)} … {_number(high)}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
