"""Results as one HTML page without scripts: figures, distributions, what ran at each moment, and what a sweep found."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence

from common.percentiles import percentile
from common.types import WorkerRole
from simulation.outcome import MEASURES, Outcome, RequestOutcome, Slo
from simulation.scenario import Result

_WIDTH, _HEIGHT, _MARGIN = 340, 240, 52
_COLOURS = ("#2268c4", "#d1690e", "#2a8f5b", "#b03a9c", "#8a6d1f", "#4aa3b5", "#c43b3b", "#6b6b6b")
_MAX_LINES = len(_COLOURS)  # results that are drawn one by one
_POINTS = 120  # of a line
_TITLES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end to end"}
_STYLE = """
:root { color-scheme: light dark; --line: #8888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; } .grid { display: inline-block; margin-right: 2rem; } caption { white-space: nowrap; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .2rem .8rem; text-align: right; white-space: nowrap; } th:first-child { text-align: left; }
tr { border-bottom: 1px solid var(--line); } figure { display: inline-block; margin: 0 1rem 1rem 0; }
figcaption { font-weight: 600; } text { fill: currentColor; font-size: 11px; }
svg { overflow: visible; } .key span { margin-right: 1.2rem; white-space: nowrap; }
"""

Point = tuple[float, float]


def page(results: Sequence[Result], slo: Slo) -> str:
    sources = dict.fromkeys(source for one in results for source in one.sources)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Baton: a simulated fleet</title>",
        f"<style>{_STYLE}</style><h1>What the fleet would do</h1>",
        f"<p>Times of steps: {html.escape('; '.join(sources))}. {html.escape(_targets(slo))}</p>",
    ]
    if len(results) > 1:
        parts.append(_sweep(results))
    if len(results) <= _MAX_LINES:
        parts.append(_lines(results, slo))
    return "\n".join([*parts, _table(results)]) + "</html>\n"


def _targets(slo: Slo) -> str:
    given = [(name, value) for name in MEASURES if (value := getattr(slo, f"{name}_s")) is not None]
    if not given:
        return "Every answer is good: no --goodput is given."
    return (
        "An answer is good with "
        + ", ".join(f"{name.upper()} up to {1000 * value:g} ms" for name, value in given)
        + "."
    )


# ------------------------------------------------------------------------------------------------------------- sweeps


def _sweep(results: Sequence[Result]) -> str:
    """What each fleet gives for what it costs, and each policy's fleets as a table."""
    policies = [*dict.fromkeys(one.scenario.policy for one in results)]
    colours = {policy: _COLOURS[number % len(_COLOURS)] for number, policy in enumerate(policies)}
    hours = _Axis([one.figures["worker_hours"] for one in results], from_zero=True)
    marks = []
    for one in results:
        good, paid = one.figures["good_share"], one.figures["worker_hours"]
        marks.append(
            f"<circle cx='{_WIDTH * hours.at(paid):.1f}' cy='{_HEIGHT * (1 - good):.1f}' r='4' "
            f"fill='{colours[one.scenario.policy]}' fill-opacity='.75'><title>{html.escape(one.scenario.policy)}, "
            f"{one.scenario.fleet}: {good:.1%} good, {paid:.3g} worker hours</title></circle>"
        )
    levels = [(_HEIGHT * (1 - share), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
    plot = _figure("good answers (up) by worker hours", marks, hours.ticks("{:g}"), levels)
    return _key(colours) + plot + "".join(_grid(results, policy) for policy in policies)


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


def _lines(results: Sequence[Result], slo: Slo) -> str:
    names = [f"{one.scenario.policy}, {one.scenario.fleet}" for one in results]
    colours = dict(zip(names, _COLOURS, strict=False))
    parts = [_key(colours)]
    for name, value_of in MEASURES.items():
        values = [sorted(_served(one.outcome, value_of)) for one in results]
        parts.append(_distribution(name, values, getattr(slo, f"{name}_s")))
    parts.append(_over_time("answers under way", [[*_under_way(one.outcome)] for one in results]))
    if any(one.outcome.scaled for one in results):
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
            parts.append(_over_time(f"{role.value} workers wanted", [[*_wanted(one.outcome, role)] for one in results]))
    return "".join(parts)


def _served(outcome: Outcome, value_of: Callable[[RequestOutcome], float | None]) -> Iterator[float]:
    """The values that the figures are made of: a failed request has none."""
    for one in outcome.requests:
        if not one.failure and one.ttft_s is not None and (value := value_of(one)) is not None:
            yield value


def _distribution(name: str, values: Sequence[Sequence[float]], most_s: float | None) -> str:
    """Shares of served requests up to each value, which is logarithmic."""
    known = [1000 * value for each in values if each for value in (each[0], each[-1])]
    if not known:
        return ""
    axis = _Axis([math.log10(max(value, 1e-3)) for value in (*known, *([1000 * most_s] if most_s else []))])

    def across(seconds: float) -> float:
        return _WIDTH * axis.at(math.log10(max(1000 * seconds, 1e-3)))

    marks = []
    for number, ordered in enumerate(values):
        shares = [step / _POINTS for step in range(_POINTS + 1)] if ordered else []
        marks.append(_line([(across(percentile(ordered, share)), _HEIGHT * (1 - share)) for share in shares], number))
    if most_s:
        x = across(most_s)
        marks.append(
            f"<line x1='{x:.1f}' y1='0' x2='{x:.1f}' y2='{_HEIGHT}' stroke='currentColor' stroke-dasharray='4'/>"
        )
    decades = [(_WIDTH * axis.at(math.log10(value)), f"{value:g}") for value in axis.decades()]
    levels = [(_HEIGHT * (1 - share), f"{share:.0%}") for share in (0, 0.5, 0.9, 1)]
    return _figure(f"{_TITLES[name]}, ms", marks, decades, levels)


def _over_time(title: str, lines: Sequence[Sequence[Point]]) -> str:
    time = _Axis([at for line in lines for at, _ in line] or [0.0], from_zero=True)
    level = _Axis([value for line in lines for _, value in line] or [0.0], from_zero=True)
    marks = [
        _line([(_WIDTH * time.at(at), _HEIGHT * (1 - level.at(value))) for at, value in line], number)
        for number, line in enumerate(lines)
    ]
    levels = [(_HEIGHT - x * _HEIGHT / _WIDTH, text) for x, text in level.ticks("{:g}")]
    return _figure(f"{title} (up) by seconds", marks, time.ticks("{:g}"), levels)


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


class _Axis:
    """Places of values, from 0 to 1."""

    def __init__(self, values: Sequence[float], *, from_zero: bool = False) -> None:
        self.low = 0.0 if from_zero else min(values)
        self.high = max(*values, self.low + 1e-9) if len(values) > 1 else max(values[0], self.low + 1e-9)

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self, form: str) -> list[tuple[float, str]]:
        """Round values and their places along the width."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [
            (_WIDTH * self.at(number * step), form.format(round(number * step, 9))) for number in range(first, last + 1)
        ]

    def decades(self) -> Iterator[float]:
        """1, 3, 10, 30 ... if the axis is of logarithms; more of them on a short one."""
        factors = (1, 3) if self.high - self.low > 1 else (1, 1.5, 2, 3, 5, 7)
        for power in range(math.floor(self.low), math.ceil(self.high) + 1):
            for factor in factors:
                if self.low <= math.log10(factor * 10.0**power) <= self.high:
                    yield factor * 10.0**power


def _line(points: Sequence[Point], number: int) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f"<polyline points='{places}' fill='none' stroke='{_COLOURS[number]}' stroke-width='1.6'/>"


def _key(colours: dict[str, str]) -> str:
    spans = (f"<span><b style='color:{colour}'>●</b> {html.escape(name)}</span> " for name, colour in colours.items())
    return f"<p class='key'>{''.join(spans)}</p>"


def _figure(
    title: str, marks: Sequence[str], across: Sequence[tuple[float, str]], levels: Sequence[tuple[float, str]]
) -> str:
    grid = [f"<line x1='0' y1='{y:.1f}' x2='{_WIDTH}' y2='{y:.1f}' stroke='#8883'/>" for y, _ in levels]
    labels = [f"<text x='{x:.0f}' y='{_HEIGHT + 16}' text-anchor='middle'>{text}</text>" for x, text in across]
    labels += [f"<text x='-6' y='{y + 4:.0f}' text-anchor='end'>{text}</text>" for y, text in levels]
    frame = f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='none' stroke='#8888'/>"
    whole = _WIDTH + 2 * _MARGIN
    return (
        f"<figure><figcaption>{title}</figcaption><svg role='img' aria-label='{title}' width='{whole}' "
        f"height='{_HEIGHT + _MARGIN}' viewBox='{-_MARGIN} -10 {whole} {_HEIGHT + _MARGIN}'>"
        f"{frame}{''.join(grid)}{''.join(marks)}{''.join(labels)}</svg></figure>"
    )


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
