"""Shared by the benchmarks: repeated, interleaved measurements, and a table of medians."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(slots=True, frozen=True)
class Figure:
    """One measured quantity of one system, over all repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))


Row = dict[str, Figure]  # system: figure


def interleave(systems: Mapping[str, Callable[[], Mapping[str, float]]], repeats: int) -> dict[str, Row]:
    """Runs the systems in turn, `repeats` times after one warm-up each, so that drift of the machine hits all alike.

    Each call returns its figures by name; the result is figure name to system to `Figure`.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for number in range(repeats + 1):
        for system, measure in systems.items():
            print(f"{'warm-up' if number == 0 else f'run {number}/{repeats}'}: {system}", file=sys.stderr, flush=True)
            figures = measure()
            if number == 0:
                continue
            for name, value in figures.items():
                values.setdefault(name, {}).setdefault(system, []).append(value)
    return {name: {system: Figure.of(v) for system, v in row.items()} for name, row in values.items()}


def print_table(title: str, rows: Mapping[str, Row], *, ratio: tuple[str, str] | None = None) -> None:
    """Medians with their range; `ratio` names two systems whose quotient is shown."""
    systems = list(dict.fromkeys(system for row in rows.values() for system in row))
    table = Table(title=title)
    table.add_column("")
    for system in systems:
        table.add_column(system, justify="right")
    if ratio:
        table.add_column(f"{ratio[0]} / {ratio[1]}", justify="right")
    for name, row in rows.items():
        cells = [_cell(row.get(system)) for system in systems]
        if ratio and ratio[0] in row and ratio[1] in row:
            cells.append(f"{row[ratio[0]].median / row[ratio[1]].median:.2f}")
        table.add_row(name, *cells)
    Console(width=110).print(table)


def write_json(path: Path, rows: Mapping[str, Row]) -> None:
    data = {
        name: {system: {"median": f.median, "min": f.low, "max": f.high} for system, f in row.items()}
        for name, row in rows.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    digits = 1 if figure.median >= 10 else 2
    return f"{figure.median:.{digits}f}  [{figure.low:.{digits}f} … {figure.high:.{digits}f}]"
