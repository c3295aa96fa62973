"""Charts of all reports, as SVG without scripts or other files: lines, dots, steps; axes have round numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_SIZE = 380, 250  # of a chart in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 8, 40
COLOURS = ("#2268c4", "#d1690e", "#2c8a4b", "#a03a9a", "#b0272b", "#6b7280", "#0e7c86", "#8a6d00")
STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem .8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } tr { border-bottom: 1px solid var(--line); }
figure { display: inline-block; vertical-align: top; margin: 0 1rem 1.2rem 0; }
figcaption { font-weight: 600; } text { fill: currentColor; font-size: 11px; }
svg { max-width: 100%; height: auto; } figure .key { font-size: 12px; max-width: 380px; }
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
    hints: Sequence[str] = ()  # of each of the dots or marks, shown under the pointer
    radius: float = 2.5  # of dots


@dataclass(slots=True, frozen=True, kw_only=True)
class Axis:
    """Values beyond `low` and `high` are drawn at the edge."""

    title: str
    is_log: bool = False
    low: float | None = None  # where it begins; the least value if None
    high: float | None = None
    ticks: Sequence[float] = ()  # round numbers if empty
    written: Callable[[float], str] | None = None  # how a tick is written


@dataclass(slots=True, frozen=True)
class Level:
    """A line across the plot, such as a target."""

    value: float
    name: str
    is_upright: bool = False  # at a value of the x axis
    colour: str = "#b0272b"


def chart(
    title: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    levels: Sequence[Level] = (),
    *,
    has_diagonal: bool = False,
    has_key: bool = True,
    size: tuple[int, int] = _SIZE,
) -> str:
    """A `<figure>` of `size` pixels (width, height); nothing if no series has a point.

    `has_diagonal`: with a line where both axes have the same value. `has_key`: with the names of several series below;
    `key` is for charts that share one.
    """
    shown = [one for one in series if one.points]
    if not shown:
        return ""
    width, height = size
    across = _Scale(
        x,
        [point[0] for one in shown for point in one.points] + [level.value for level in levels if level.is_upright],
        _LEFT,
        width - _RIGHT,
    )
    up = _Scale(
        y,
        [point[1] for one in shown for point in one.points] + [level.value for level in levels if not level.is_upright],
        height - _BOTTOM,
        _TOP,
    )
    parts = [*_grid(across, up), *_titles(across, up)]
    if has_diagonal:
        low, high = max(across.least, up.least), min(across.most, up.most)
        parts.append(_dashed(across.at(low), up.at(low), across.at(high), up.at(high), "currentColor"))
    for level in levels:
        parts += _level(level, across, up)
    colours: dict[str, str] = {}
    for index, one in enumerate(shown):
        colours[one.name] = one.colour or COLOURS[index % len(COLOURS)]
        parts += _drawn(one, colours[one.name], across, up)
    name = html.escape(title, quote=True)
    return (
        f"<figure><figcaption>{name}</figcaption>"
        f"<svg role='img' aria-label='{name}' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>"
        f"{''.join(parts)}</svg>{key(colours) if has_key and len(colours) > 1 else ''}</figure>"
    )


def key(colours: Mapping[str, str]) -> str:
    """Which name has which colour."""
    names = (f"<span><b style='color:{colour}'>●</b> {html.escape(name)}</span> " for name, colour in colours.items())
    return f"<div class='key'>{''.join(names)}</div>"


class _Scale:
    """Values to pixels from `begin` to `end`: from left to right, or from the bottom to the top."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: int, end: int) -> None:
        self.axis, self.begin, self.end = axis, begin, end
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        # Over less than half a decade, a logarithmic axis would have hardly a round number on it.
        self._is_log = axis.is_log and low > 0 and high >= 3 * low
        if self._is_log:
            self.low, self.high = math.log10(low), math.log10(high)
        else:
            starts_at_0 = axis.low is None and not axis.is_log
            self.low, self.high = min(low, 0.0) if starts_at_0 else low, high
        margin = 0.04 * (self.high - self.low) or (0.3 if self._is_log else abs(self.high) or 1.0)
        self.high += margin
        if axis.is_log or self.low < 0:
            self.low -= margin

    @property
    def least(self) -> float:
        """The value at its beginning."""
        return 10.0**self.low if self._is_log else self.low

    @property
    def most(self) -> float:
        return 10.0**self.high if self._is_log else self.high

    def at(self, value: float) -> float:
        if self._is_log:
            value = math.log10(value) if value > 0 else -math.inf
        share = (value - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * min(max(share, 0.0), 1.0)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Places, and what is written there."""
        written = self.axis.written or _short
        for value in self.axis.ticks or self._round_values():
            yield self.at(value), written(value)

    def _round_values(self) -> Iterator[float]:
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
    for at, text in across.ticks():
        yield f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{up.end}' y2='{up.begin}' stroke='#8883'/>"
        yield f"<text x='{at:.1f}' y='{up.begin + 14}' text-anchor='middle'>{html.escape(text)}</text>"
    for at, text in up.ticks():
        yield f"<line x1='{across.begin}' x2='{across.end}' y1='{at:.1f}' y2='{at:.1f}' stroke='#8883'/>"
        yield f"<text x='{across.begin - 5}' y='{at + 4:.1f}' text-anchor='end'>{html.escape(text)}</text>"


def _titles(across: _Scale, up: _Scale) -> Iterator[str]:
    x, y = (html.escape(scale.axis.title) for scale in (across, up))
    center, middle = ((scale.begin + scale.end) / 2 for scale in (across, up))
    yield f"<text x='{center}' y='{up.begin + 32}' text-anchor='middle'>{x}</text>"
    yield f"<text transform='translate(12 {middle}) rotate(-90)' text-anchor='middle'>{y}</text>"


def _level(level: Level, across: _Scale, up: _Scale) -> Iterator[str]:
    name = html.escape(level.name)
    if level.is_upright:
        at = across.at(level.value)
        yield _dashed(at, up.begin, at, up.end, level.colour)
        yield f"<text x='{at + 4:.1f}' y='{up.begin - 5}'>{name}</text>"
    else:
        at = up.at(level.value)
        yield _dashed(across.begin, at, across.end, at, level.colour)
        yield f"<text x='{across.end - 4}' y='{at - 4:.1f}' text-anchor='end'>{name}</text>"


def _dashed(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    line = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {line} stroke='{colour}' stroke-dasharray='5 3'/>"


def _drawn(series: Series, colour: str, across: _Scale, up: _Scale) -> Iterator[str]:
    places = [(across.at(x), up.at(y)) for x, y in series.points]
    if series.kind in ("line", "steps", "marks"):
        path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
        for x, y in places[1:]:
            path += f"H{x:.1f}V{y:.1f}" if series.kind == "steps" else f"L{x:.1f} {y:.1f}"
        yield f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.6'/>"
    if series.kind in ("dots", "marks"):
        radius, opacity = (series.radius, 0.6) if series.kind == "dots" else (3.5, 1.0)
        for (x, y), hint in zip(places, series.hints or [""] * len(places), strict=True):
            circle = f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' fill='{colour}' fill-opacity='{opacity}'"
            yield f"{circle}><title>{html.escape(hint)}</title></circle>" if hint else f"{circle}/>"
    for (x, y), label in zip(places, series.labels, strict=False):
        side, anchor = (-6, "end") if x > across.begin + 0.6 * (across.end - across.begin) else (6, "start")
        yield f"<text x='{x + side:.1f}' y='{y - 6:.1f}' text-anchor='{anchor}'>{html.escape(label)}</text>"


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"
