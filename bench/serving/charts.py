"""Plots as SVG, without scripts or other files: lines, dots, steps, with axes that have round numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 380, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 8, 40
COLOURS = ("#2268c4", "#d1690e", "#2c8a4b", "#a03a9a", "#b0272b", "#6b7280", "#0e7c86", "#8a6d00")
STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem .8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } tr { border-bottom: 1px solid var(--line); }
figure { display: inline-block; vertical-align: top; margin: 0 1rem 1.2rem 0; }
figcaption { font-weight: 600; } text { fill: currentColor; font-size: 11px; }
svg { max-width: 100%; height: auto; } .key { font-size: 12px; max-width: 380px; }
.key span { margin-right: 1rem; white-space: nowrap; }
.bad, .good { border-left: 4px solid #b0272b; padding: .2rem .8rem; } .good { border-color: #2c8a4b; }
.wide { overflow-x: auto; } .beside { display: flex; flex-wrap: wrap; gap: 3rem; align-items: start; }
"""

Point = tuple[float, float]


@dataclass(slots=True, frozen=True, kw_only=True)
class Series:
    name: str
    points: Sequence[Point]
    kind: str = "line"  # or dots, steps, marks (a line with a dot at each point)
    colour: str = ""  # the next of `COLOURS` if empty
    labels: Sequence[str] = ()  # beside the points of `marks`


@dataclass(slots=True, frozen=True, kw_only=True)
class Axis:
    title: str
    is_log: bool = False
    low: float | None = None  # where it begins; the least value if None
    high: float | None = None


@dataclass(slots=True, frozen=True)
class Level:
    """A horizontal line across the plot, such as a target."""

    value: float
    name: str


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], levels: Sequence[Level] = ()) -> str:
    """A `<figure>`; nothing if no series has a point."""
    shown = [one for one in series if one.points]
    if not shown:
        return ""
    across = _Scale(x, [point[0] for one in shown for point in one.points], _LEFT, WIDTH - _RIGHT)
    values = [point[1] for one in shown for point in one.points] + [level.value for level in levels]
    up = _Scale(y, values, HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(across, up), *_titles(x, y)]
    for level in levels:
        at = up.at(level.value)
        parts.append(
            f"<line x1='{_LEFT}' x2='{WIDTH - _RIGHT}' y1='{at:.1f}' y2='{at:.1f}' stroke='#b0272b' "
            "stroke-dasharray='5 3'/>"
            f"<text x='{WIDTH - _RIGHT - 4}' y='{at - 4:.1f}' text-anchor='end'>{html.escape(level.name)}</text>"
        )
    keys = []
    for index, one in enumerate(shown):
        colour = one.colour or COLOURS[index % len(COLOURS)]
        parts += _drawn(one, colour, across, up)
        keys.append(f"<span><b style='color:{colour}'>●</b> {html.escape(one.name)}</span>")
    key = f"<div class='key'>{''.join(keys)}</div>" if len(keys) > 1 else ""
    name = html.escape(title, quote=True)
    return (
        f"<figure><figcaption>{name}</figcaption>"
        f"<svg role='img' aria-label='{name}' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'>"
        f"{''.join(parts)}</svg>{key}</figure>"
    )


class _Scale:
    """Values to pixels from `begin` to `end`."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: float, end: float) -> None:
        self._begin, self._end = begin, end
        # Over less than half a decade, a logarithmic axis would have hardly a round number on it.
        self._is_log = axis.is_log and min(values) > 0 and max(values) >= 3 * min(values)
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if self._is_log:
            self.low, self.high = math.log10(low), math.log10(high)
        else:
            starts_at_0 = axis.low is None and not axis.is_log
            self.low, self.high = min(low, 0.0) if starts_at_0 else low, high
        margin = 0.04 * (self.high - self.low) or (0.3 if self._is_log else abs(self.high) or 1.0)
        self.high += margin
        if axis.is_log or self.low < 0:
            self.low -= margin

    def at(self, value: float) -> float:
        share = ((math.log10(value) if self._is_log else value) - self.low) / (self.high - self.low)
        return self._begin + (self._end - self._begin) * min(max(share, 0.0), 1.0)

    def ticks(self) -> Iterator[float]:
        if self._is_log:
            factors = (1, 2, 5) if self.high - self.low < 2.2 else (1,)
            for power in range(math.floor(self.low), math.ceil(self.high) + 1):
                for factor in factors:
                    if self.low <= math.log10(factor) + power <= self.high:
                        yield factor * 10.0**power
            return
        step = _round_step((self.high - self.low) / 5)
        for number in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            yield number * step


def _round_step(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * 0.999)


def _grid(across: _Scale, up: _Scale) -> Iterator[str]:
    bottom = HEIGHT - _BOTTOM
    for value in across.ticks():
        at = across.at(value)
        yield f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{_TOP}' y2='{bottom}' stroke='#8883'/>"
        yield f"<text x='{at:.1f}' y='{bottom + 14}' text-anchor='middle'>{_short(value)}</text>"
    for value in up.ticks():
        at = up.at(value)
        yield f"<line x1='{_LEFT}' x2='{WIDTH - _RIGHT}' y1='{at:.1f}' y2='{at:.1f}' stroke='#8883'/>"
        yield f"<text x='{_LEFT - 5}' y='{at + 4:.1f}' text-anchor='end'>{_short(value)}</text>"


def _titles(x: Axis, y: Axis) -> Iterator[str]:
    center = (_LEFT + WIDTH - _RIGHT) / 2
    yield f"<text x='{center}' y='{HEIGHT - 8}' text-anchor='middle'>{html.escape(x.title)}</text>"
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    yield f"<text transform='translate(12 {middle}) rotate(-90)' text-anchor='middle'>{html.escape(y.title)}</text>"


def _drawn(series: Series, colour: str, across: _Scale, up: _Scale) -> Iterator[str]:
    places = [(across.at(x), up.at(y)) for x, y in series.points]
    if series.kind in ("line", "steps", "marks"):
        path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
        for x, y in places[1:]:
            path += f"H{x:.1f}V{y:.1f}" if series.kind == "steps" else f"L{x:.1f} {y:.1f}"
        yield f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.6'/>"
    if series.kind in ("dots", "marks"):
        radius, opacity = (2.5, 0.6) if series.kind == "dots" else (3.5, 1.0)
        for x, y in places:
            yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' fill='{colour}' fill-opacity='{opacity}'/>"
    for (x, y), label in zip(places, series.labels, strict=False):
        side, anchor = (-6, "end") if x > WIDTH * 0.6 else (6, "start")
        yield f"<text x='{x + side:.1f}' y='{y - 6:.1f}' text-anchor='{anchor}'>{html.escape(label)}</text>"


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"
