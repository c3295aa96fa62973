"""`baton bench compare`: two or more runs side by side, of `baton bench serve` or of `vllm bench serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.command_line import outcome
from bench.serving.figures import LATENCIES, Json, number
from common.errors import ConfigError

HIGHER_IS_BETTER = (
    "request_throughput", "output_throughput", "total_token_throughput", "request_goodput", "token_goodput",
    "good_request_fraction", "max_rate",
)  # fmt: skip
LOWER_IS_BETTER = (
    *(f"{column}_{name}_ms" for name in LATENCIES for column in ("mean", "median", "p90", "p99")),
    "failed", "refused",
)  # fmt: skip
SAME_LOAD = (
    "dataset_name", "num_prompts", "request_rate", "burstiness", "max_concurrency", "random_input_len",
    "random_output_len", "goodput",
)  # fmt: skip
SMALL_CHANGE = 0.01  # a share; two single runs of the same differ by as much


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "the same"
    UNSURE = "not sure"  # the intervals of the means overlap, or there are none and the difference is small


@dataclass(slots=True, frozen=True)
class Row:
    name: str
    base: float
    other: float
    change: float | None  # share of `base`; None if that is 0
    verdict: Verdict


def read_run(path: Path) -> dict[str, Json]:
    """Raises `ConfigError` for a file that is no result of a run."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"is no JSON: {error}") from error
    if not isinstance(found, dict) or "request_throughput" not in found:
        raise ConfigError(str(path), "is no result of a run: there is no request_throughput")
    return found


def compare(base: Mapping[str, Json], other: Mapping[str, Json]) -> list[Row]:
    """A row for each figure that both have."""
    rows = []
    for name in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
        if isinstance(base.get(name), int | float) and isinstance(other.get(name), int | float):
            one, two = number(base, name), number(other, name)
            change = (two - one) / one if one else None
            rows.append(Row(name, one, two, change, _verdict(name, base, other)))
    return rows


def _verdict(name: str, base: Mapping[str, Json], other: Mapping[str, Json]) -> Verdict:
    one, two = number(base, name), number(other, name)
    if one == two:
        return Verdict.SAME
    bounds, others = _bounds(base, name), _bounds(other, name)
    if bounds and others:
        is_unsure = bounds[0] <= others[1] and others[0] <= bounds[1]
    else:
        is_unsure = abs(two - one) < SMALL_CHANGE * abs(one)
    if is_unsure:
        return Verdict.UNSURE
    return Verdict.BETTER if (two > one) is (name in HIGHER_IS_BETTER) else Verdict.WORSE


def _bounds(run: Mapping[str, Json], name: str) -> tuple[float, float] | None:
    intervals = run.get("confidence_95")
    found = intervals.get(name) if isinstance(intervals, dict) else None
    return (float(str(found[0])), float(str(found[1]))) if isinstance(found, list) else None


def differences(base: Mapping[str, Json], other: Mapping[str, Json]) -> list[str]:
    """What makes the two no comparison of the same load, or no comparison at all."""
    found = [
        f"{name} is {base[name]} and {other[name]}"
        for name in SAME_LOAD
        if name in base and name in other and base[name] != other[name]
    ]
    return found + [
        f"{which} is not valid: the client was the bottleneck"
        for which, run in (("the first", base), ("the second", other))
        if run.get("valid") is False
    ]


@click.command("compare", short_help="Two runs of serve side by side.", context_settings={"max_content_width": 110})
@click.argument("base", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("others", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--fail-above", metavar="PERCENT", type=click.FloatRange(min=0), help="exit code 1 if a figure is worse by more"
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def compare_command(base: Path, others: Sequence[Path], fail_above: float | None, as_json: bool) -> int:
    """Compares runs with the first one: BASE and OTHERS are JSON of `baton bench serve` or `vllm bench serve`. With
    repeats in both, a difference counts only if the 95 % intervals of the means do not overlap; else only if it is 1 %
    at least.

    \b
    Examples:
      baton bench compare before.json after.json
      baton bench compare main.json branch.json --fail-above 5
    """

    def run() -> int:
        first = read_run(base)
        is_worse = False
        printed: list[Json] = []
        for path in others:
            second = read_run(path)
            rows, doubts = compare(first, second), differences(first, second)
            is_worse |= fail_above is not None and any(_is_worse(row, fail_above) for row in rows)
            if as_json:
                printed.append(
                    {
                        "base": str(base),
                        "other": str(path),
                        "doubts": [*doubts],
                        "figures": [_json(row) for row in rows],
                    }
                )
            else:
                _print(str(base), str(path), rows, doubts)
        if as_json:
            print(json.dumps({"comparisons": printed}, ensure_ascii=False))
        return 1 if is_worse else 0

    return outcome("compare", run)


def _is_worse(row: Row, percent: float) -> bool:
    return row.verdict is Verdict.WORSE and (row.change is None or 100 * abs(row.change) > percent)


def _json(row: Row) -> dict[str, Json]:
    return {"name": row.name, "base": row.base, "other": row.other, "change": row.change, "verdict": str(row.verdict)}


_STYLES = {Verdict.BETTER: "green", Verdict.WORSE: "red", Verdict.SAME: "dim", Verdict.UNSURE: "dim"}


def _print(base: str, other: str, rows: Sequence[Row], doubts: Sequence[str]) -> None:
    console = Console()
    table = Table("figure", box=None)
    for column in (Path(base).name, Path(other).name, "change", ""):
        table.add_column(escape(column), justify="right" if column else "left")
    for row in rows:
        style = _STYLES[row.verdict]
        change = "" if row.change is None else f"{row.change:+.1%}"
        table.add_row(
            escape(row.name), f"{row.base:,.4g}", f"{row.other:,.4g}", change, f"[{style}]{row.verdict}[/{style}]"
        )
    console.print(table)
    for doubt in doubts:
        console.print(f"[yellow]{escape(doubt)}[/yellow]", highlight=False)
