"""`baton bench sweep`: the same load at several rates or numbers of users, on several endpoints or stacks."""

from __future__ import annotations

import contextlib
import html
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.command_line import outcome
from bench.kv.settings import show_progress
from bench.processes import running
from bench.serving.console import progress_bar
from bench.serving.endpoint import Target
from bench.serving.figures import Figures, Json, number
from bench.serving.files import check_outputs, settings_json, write
from bench.serving.measure import MeasureSettings, measure
from bench.serving.options import AS_JSON, OUTPUT, Options, load_options, read_options, url_of
from common.charts import STYLE, Axis, Level, Series, chart
from common.errors import BatonError, ConfigError


@dataclass(slots=True, frozen=True, kw_only=True)
class System:
    """An endpoint, or a stack that is started for the sweep."""

    name: str
    url: str = ""
    roles: tuple[int, int] | None = None  # prefill and decode workers of a stack; it is started if this is set

    @property
    def num_workers(self) -> int | None:
        return None if self.roles is None else sum(self.roles)


@dataclass(slots=True, frozen=True)
class Point:
    system: System
    request_rate: float  # inf in a closed loop
    max_concurrency: int | None
    figures: Figures
    settings: Mapping[str, Json]

    @property
    def load(self) -> str:
        users = "" if self.max_concurrency is None else f"{self.max_concurrency} users"
        if not math.isinf(self.request_rate) and self.max_concurrency is not None:
            users = f"{self.max_concurrency} at most"
        rate = "" if math.isinf(self.request_rate) else f"{self.request_rate:g}/s"
        return ", ".join(part for part in (rate, users) if part)

    @property
    def tokens_per_user(self) -> float:
        """Output tokens per second that one user sees: 1 / median TPOT."""
        tpot_ms = number(self.figures, "median_tpot_ms")
        return 1000 / tpot_ms if tpot_ms else 0.0

    @property
    def tokens(self) -> float:
        """Output tokens per second of all together; of a stack, per worker."""
        return number(self.figures, "output_throughput") / (self.system.num_workers or 1)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other point beats in tokens per user and in tokens, by tokens per user. Points that are not valid
    have no place among them."""
    best: list[Point] = []
    for point in sorted(points, key=lambda one: (one.tokens_per_user, one.tokens), reverse=True):
        if point.figures["valid"] and point.tokens > (best[-1].tokens if best else 0.0):
            best.append(point)
    return best[::-1]


def _numbers(kind: type[float] | type[int]) -> Any:
    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:  # noqa: ARG001
        try:
            found = tuple(kind(text) for text in (value or "").split(",") if text.strip())
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not numbers with commas between them") from error
        if any(not one > 0 for one in found):
            raise click.BadParameter(f"{value!r} has a number that is not above 0")
        return found

    return read


def _roles(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[tuple[int, int], ...]:  # noqa: ARG001
    found = []
    for text in (value or "").split(","):
        if not text.strip():
            continue
        prefill, _, decode = text.strip().partition(":")
        if not (prefill.isdecimal() and decode.isdecimal() and int(decode) > 0):
            raise click.BadParameter(f"{text!r} is not PREFILL:DECODE, such as 1:2")
        found.append((int(prefill), int(decode)))
    return tuple(found)


@click.command(
    "sweep",
    short_help="serve at many rates, concurrencies, endpoints and P:D ratios.",
    context_settings={"max_content_width": 110},
)
@click.option(
    "--base-url", "base_urls", metavar="[NAME=]URL", multiple=True, help="an endpoint; may be given several times"
)
@click.option(
    "--pd",
    metavar="P:D,P:D",
    callback=_roles,
    help="numbers of prefill and decode workers: a stack of each is started on this machine",
)
@click.option(
    "--up",
    "up_flags",
    metavar="FLAG",
    multiple=True,
    help="of `baton up` for these stacks, such as --up=--device=simulated",
)
@click.option("--request-rates", metavar="FLOAT,FLOAT", callback=_numbers(float), help="requests per second")
@click.option(
    "--concurrencies",
    metavar="INT,INT",
    callback=_numbers(int),
    help="requests at a time; without rates, users who send one after another",
)
@load_options
@OUTPUT
@AS_JSON
def sweep(
    base_urls: tuple[str, ...],
    pd: tuple[tuple[int, int], ...],
    up_flags: tuple[str, ...],
    request_rates: tuple[float, ...],
    concurrencies: tuple[int, ...],
    output: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> int:
    """Measures every combination of system, rate and concurrency. The Pareto front has the points that no other beats
    in both output tokens per second of one user and of all users (of a started stack: per worker).

    \b
    Examples:
      baton bench sweep --request-rates 1,2,4,8 --goodput ttft:500 tpot:50 -o sweep.html
      baton bench sweep --base-url baton=http://a:8000 --base-url vllm=http://b:8000 --concurrencies 1,4,16
      baton bench sweep --pd 1:1,1:2,2:1 --up=--device=simulated --up=--times=h100-8b --concurrencies 8,64
    """

    def run() -> int:
        check_outputs(output, (".json", ".html"))
        if not request_rates and not concurrencies:
            raise ConfigError("--request-rates", "or --concurrencies must be given")
        if pd and base_urls:
            raise ConfigError("--pd", "does not go with --base-url")
        options = read_options(given)
        systems = [System(name=f"{p}P:{d}D", roles=(p, d)) for p, d in pd] or _named(base_urls, options.target.backend)
        points: list[Point] = []
        failed: dict[str, str] = {}
        for system in systems:
            try:
                with _served(system, up_flags, options.target.backend) as url:
                    target = replace(options.target, name=system.name, url=url)
                    for rate in request_rates or (math.inf,):
                        for users in concurrencies or (None,):
                            load = options.settings.at_rate(rate).at_concurrency(None if users is None else int(users))
                            points.append(_measure(options, system, target, load))
            except ConfigError:
                raise
            except BatonError as error:  # what was measured before is not lost, and others may do better
                failed[system.name] = error.message
                show_progress(f"{system.name}: failed: {error.message}")
        if points:
            _report(points, failed, options, output, as_json=as_json)
        return 0 if not failed and all(point.figures["valid"] for point in points) else 1

    return outcome("sweep", run)


def _named(urls: Sequence[str], backend: str) -> list[System]:
    systems = []
    for text in urls or (url_of(None, backend),):
        name, is_named, url = text.partition("=")
        systems.append(System(name=name, url=url) if is_named and "/" not in name else System(name=text, url=text))
    if len({system.name for system in systems}) < len(systems):
        raise ConfigError("--base-url", "two endpoints have the same name")
    return systems


@contextlib.contextmanager
def _served(system: System, up_flags: Sequence[str], backend: str) -> Iterator[str]:
    """The URL to ask. Starts a stack if `system` is one, and ends it. Raises `StartupError`."""
    if system.roles is None:
        yield system.url
        return
    prefill, decode = system.roles
    flags = [f"--prefill={prefill}", f"--decode={decode}", "--http-port=0", "--grpc-port=0", "--log-level=warning"]
    with running([sys.executable, "-m", "baton", "up", *flags, "--max-restarts=0", *up_flags], "baton up") as fields:
        yield fields["http"] if backend.startswith("openai") else fields["grpc"]


def _measure(options: Options, system: System, target: Target, settings: MeasureSettings) -> Point:
    load = settings.load
    words = options.texts.salted(f"{load.request_rate:g}/s, {load.max_concurrency}")
    measured = uvloop.run(measure(target, settings, words, progress_bar))
    shown = settings_json(target, settings, measured, options.tokenizer)
    point = Point(system, load.request_rate, load.max_concurrency, measured.figures, shown)
    Console(stderr=True).print(
        f"{system.name}, {point.load}: {number(point.figures, 'output_throughput'):.4g} tokens/s, "
        f"TTFT p99 {number(point.figures, 'p99_ttft_ms'):.0f} ms" + ("" if point.figures["valid"] else ", invalid"),
        highlight=False,
        markup=False,
    )
    return point


def _report(
    points: Sequence[Point], failed: Mapping[str, str], options: Options, output: Sequence[str], *, as_json: bool
) -> None:
    front = pareto(points)
    whole: dict[str, Json] = {
        "points": [
            {**point.settings, **point.figures, "tokens_per_user": point.tokens_per_user, "pareto": point in front}
            for point in points
        ],
        "failed": dict(failed),
    }
    for path in output:
        write(
            path,
            json.dumps(whole, ensure_ascii=False) + "\n"
            if path.endswith(".json")
            else sweep_page(points, options.settings.targets),
        )
    if as_json:
        print(json.dumps(whole, ensure_ascii=False))
        return
    table = Table(box=None)
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if index < 2 else "right")
    for point in points:
        table.add_row(*map(Text, _cells(point, is_best=point in front)))
    # Where nobody says how wide it may be, it is not folded.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


_COLUMNS = (
    "system",
    "load",
    "requests/s",
    "tokens/s",
    "tokens/s a user",
    "TTFT p50",
    "p99",
    "TPOT p50",
    "p99",
    "good",
    "",
)


def _cells(point: Point, *, is_best: bool) -> list[str]:
    made = point.figures
    good = f"{number(made, 'good_request_fraction'):.1%}" if "good_request_fraction" in made else ""
    note = "invalid" if not made["valid"] else "Pareto" if is_best else ""
    values = [f"{number(made, name):,.4g}" for name in ("request_throughput", "output_throughput")] + [
        f"{point.tokens_per_user:.4g}"
    ]
    values += [f"{number(made, f'{name}_ms'):,.4g}" for name in ("median_ttft", "p99_ttft", "median_tpot", "p99_tpot")]
    return [point.system.name, point.load, *values, good, note]


def sweep_page(points: Sequence[Point], targets: Mapping[str, float]) -> str:
    """One HTML page that needs nothing else."""
    front = pareto(points)
    names = list(dict.fromkeys(point.system.name for point in points))
    own = {name: [point for point in points if point.system.name == name] for name in names}
    is_rate = any(not math.isinf(point.request_rate) for point in points)
    across = Axis(title="requests/s asked for" if is_rate else "requests at a time")

    def series(value: str) -> list[Series]:
        return [
            Series(
                name=name,
                kind="marks",
                points=sorted(
                    (point.request_rate if is_rate else float(point.max_concurrency or 0), number(point.figures, value))
                    for point in own[name]
                ),
            )
            for name in names
        ]

    def levels(name: str) -> list[Level]:
        return [Level(targets[name], "target")] if name in targets else []

    per_worker = " per worker" if points[0].system.roles else ""
    clouds = [
        Series(
            name=name,
            kind="dots",
            points=[(point.tokens_per_user, point.tokens) for point in own[name]],
        )
        for name in names
    ]
    best = Series(
        name="Pareto front",
        kind="marks",
        points=[(point.tokens_per_user, point.tokens) for point in front],
        labels=[f"{point.system.name} {point.load}" if len(names) > 1 else point.load for point in front],
    )
    charts = [
        chart(
            "Pareto front",
            Axis(title="output tokens/s of one user"),
            Axis(title=f"output tokens/s{per_worker}"),
            [*clouds, best],
        ),
        chart("TTFT, 99th percentile", across, Axis(title="ms"), series("p99_ttft_ms"), levels("ttft")),
        chart("TPOT, 99th percentile", across, Axis(title="ms"), series("p99_tpot_ms"), levels("tpot")),
        chart("Throughput", across, Axis(title="output tokens/s"), series("output_throughput")),
    ]
    if targets:
        charts.append(chart("Goodput", across, Axis(title="good requests/s"), series("request_goodput")))
    head = "".join(f"<th>{html.escape(column)}" for column in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in _cells(point, is_best=point in front)) + "</tr>"
        for point in points
    )
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>baton bench sweep</title>"
        f"<style>{STYLE}</style><h1>Sweep</h1>{''.join(charts)}"
        f"<div class='wide'><table><tr>{head}</tr>{rows}</table></div><p>Times in milliseconds.</p></html>\n"
    )
