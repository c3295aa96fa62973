"""Results as one HTML page without scripts: figures, distributions, what ran at each moment, and what a sweep found."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence

from common.charts import COLOURS, STYLE, Axis, Level, Point, Series, chart, key
from common.goodput import Goodput
from common.percentiles import percentile
from common.types import WorkerRole
from simulation.outcome import MEASURES, Outcome, RequestOutcome
from simulation.scenario import Result

_MAX_LINES = len(COLOURS)  # results that are drawn one by one
_POINTS = 120  # of a line
_LEAST_MS = 1e-3  # that a logarithmic axis shows
_TITLES = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end to end"}
_OWN_STYLE = """
.grid { display: inline-block; margin-right: 2rem; } td, th, caption { white-space: nowrap; }
body > .key { margin: 1rem 0; }
"""


def page(results: Sequence[Result], goodput: Goodput) -> str:
    sources = dict.fromkeys(source for one in results for source in one.sources)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Baton: a simulated fleet</title>",
        f"<style>{STYLE}{_OWN_STYLE}</style><h1>What the fleet would do</h1>",
        f"<p>Times of steps: {html.escape('; '.join(sources))}. {html.escape(_told(goodput))}</p>",
    ]
    if len(results) > 1:
        parts.append(_sweep(results))
    if len(results) <= _MAX_LINES:
        parts.append(_lines(results, goodput))
    return "\n".join([*parts, _table(results)]) + "</html>\n"


def _told(goodput: Goodput) -> str:
    if not goodput:
        return "Every answer is good: no --goodput is given."
    return (
        "An answer is good with " + ", ".join(f"{name.upper()} up to {ms:g} ms" for name, ms in goodput.items()) + "."
    )


# ------------------------------------------------------------------------------------------------------------- sweeps


def _sweep(results: Sequence[Result]) -> str:
    """What each fleet gives for what it costs, and each policy's fleets as a table."""
    policies = [*dict.fromkeys(one.scenario.policy for one in results)]
    clouds = []
    for number, policy in enumerate(policies):
        own = [one for one in results if one.scenario.policy == policy]
        clouds.append(
            Series(
                name=policy,
                points=[(one.figures["worker_hours"], one.figures["good_share"]) for one in own],
                kind="dots",
                colour=COLOURS[number % len(COLOURS)],
                hints=[
                    f"{policy}, {one.scenario.fleet}: {one.figures['good_share']:.1%} good, "
                    f"{one.figures['worker_hours']:.3g} worker hours"
                    for one in own
                ],
                radius=4,
            )
        )
    plot = chart("good answers by worker hours", Axis(title="worker hours"), _SHARES, clouds)
    return plot + "".join(_grid(results, policy) for policy in policies)


_SHARES = Axis(title="good answers", low=0.0, high=1.0, ticks=(0, 0.25, 0.5, 0.75, 1), written="{:.0%}".format)


def _grid(results: Sequence[Result], policy: str) -> str:
    """Good answers by prefill and decode workers; nothing if not both differ."""
    found = {
        (one.scenario.num_workers[WorkerRole.PREFILL], one.scenario.num_workers[WorkerRole.DECODE]): one.figures
        for one in results
        if one.scenario.policy == policy
    }
    prefills, decodes = ([*dict.fromkeys(key[place] for key in found)] for place in (0, 1))
    if min(len(prefills), len(decodes)) < 2:
        return ""
    head = "".join(f"<th>{num}D" for num in decodes)
    rows = []
    for prefill in prefills:
        cells = [found.get((prefill, decode)) for decode in decodes]
        rows.append(f"<tr><th>{prefill}P" + "".join(_cell(figures) for figures in cells) + "</tr>")
    caption = f"<caption>good answers by {html.escape(policy)}</caption>"
    return f"<div class='grid'><table>{caption}<tr><th>{head}</tr>{''.join(rows)}</table></div>"


def _cell(figures: dict[str, float] | None) -> str:
    if figures is None:
        return "<td>"
    share = figures["good_share"]
    return f"<td style='background: rgb(42 143 91 / {0.55 * share:.2f})'>{share:.1%}"


# -------------------------------------------------------------------------------------------------------- few results


def _lines(results: Sequence[Result], goodput: Goodput) -> str:
    colours = {_name(one): colour for one, colour in zip(results, COLOURS, strict=False)}
    parts = [key(colours)]
    for measure, value_of in MEASURES.items():
        values = {_name(one): sorted(_served(one.outcome, value_of)) for one in results}
        parts.append(_distribution(measure, values, goodput.get(measure)))
    parts.append(_over_time("answers under way", {_name(one): [*_under_way(one.outcome)] for one in results}))
    if any(one.outcome.scaled for one in results):
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
            wanted = {_name(one): [*_wanted(one.outcome, role)] for one in results}
            parts.append(_over_time(f"{role.value} workers wanted", wanted))
    return "".join(parts)


def _name(one: Result) -> str:
    return f"{one.scenario.policy}, {one.scenario.fleet}"


def _served(outcome: Outcome, value_of: Callable[[RequestOutcome], float | None]) -> Iterator[float]:
    """The values that the figures are made of: a failed request has none."""
    for one in outcome.requests:
        if not one.failure and one.ttft_s is not None and (value := value_of(one)) is not None:
            yield value


def _distribution(measure: str, values: Mapping[str, Sequence[float]], target_ms: float | None) -> str:
    """Shares of served requests up to each value. `values`: seconds by result, the smallest first."""
    shares = [step / _POINTS for step in range(_POINTS + 1)]
    lines = {
        name: [(max(1000 * percentile(ordered, share), _LEAST_MS), share) for share in shares] if ordered else []
        for name, ordered in values.items()
    }
    return chart(
        _TITLES[measure],
        Axis(title="ms", is_log=True),
        Axis(title="answers", low=0.0, high=1.0, ticks=(0, 0.5, 0.9, 1), written="{:.0%}".format),
        _drawn(lines),
        [Level(target_ms, "target", is_upright=True)] if target_ms is not None else [],
        has_key=False,
    )


def _over_time(title: str, lines: Mapping[str, Sequence[Point]]) -> str:
    return chart(title, Axis(title="s"), Axis(title="number"), _drawn(lines), has_key=False)


def _drawn(lines: Mapping[str, Sequence[Point]]) -> list[Series]:
    return [
        Series(name=name, points=points, colour=colour)
        for (name, points), colour in zip(lines.items(), COLOURS, strict=False)
    ]


def _under_way(outcome: Outcome) -> Iterator[Point]:
    """How many answers are under way, the most within each piece of time."""
    changes = sorted(
        change for one in outcome.requests if not one.failure for change in ((one.at, 1), (one.at + one.e2e_s, -1))
    )
    num = most = 0
    piece_s, upcoming = outcome.seconds / _POINTS, 1
    for at, change in changes:
        while at >= upcoming * piece_s and upcoming <= _POINTS:
            yield upcoming * piece_s, float(most)
            most, upcoming = num, upcoming + 1
        num += change
        most = max(most, num)


def _wanted(outcome: Outcome, role: WorkerRole) -> Iterator[Point]:
    ends = [at for at, _ in outcome.scaled[1:]] + [outcome.seconds]
    for (at, numbers), end in zip(outcome.scaled, ends, strict=False):
        yield from ((at, numbers[role]), (end, numbers[role]))


# -------------------------------------------------------------------------------------------------------------- parts


def _table(results: Sequence[Result]) -> str:
    """Every figure, a row each."""
    names = dict.fromkeys(name for one in results for name in one.figures)
    head = "".join(f"<th>{html.escape(one.scenario.policy)}<br>{one.scenario.fleet}" for one in results)
    rows = [
        f"<tr><th>{name}" + "".join(f"<td>{_number(one.figures.get(name))}" for one in results) + "</tr>"
        for name in names
    ]
    return f"<div class='wide'><table><tr><th>{head}</tr>{''.join(rows)}</table></div>"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 10_000 else f"{value:,.4g}"
