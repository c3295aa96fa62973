"""A profile as one HTML page without scripts: what was predicted against what was measured, and the errors."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from common.batch_time import BatchTime, Regime
from common.batch_time_fit import MeasuredStep
from engine.profile.profile import Profile, verdict

_SIZE, _MARGIN = 300, 46
_COLOURS = {"fitted": "#9aa5b1", "another run": "#2268c4", "requests": "#d1690e"}
_STYLE = """
:root { color-scheme: light dark; --line: #8888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem .8rem; text-align: right; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
tr { border-bottom: 1px solid var(--line); } figure { display: inline-block; margin: 0 1rem 1rem 0; }
figcaption { font-weight: 600; } text { fill: currentColor; font-size: 11px; }
svg { overflow: visible; } .key span { margin-right: 1.2rem; }
"""


def page(profile: Profile) -> str:
    key = profile.time.key
    sets = {"fitted": profile.fitted, "another run": profile.other_run, "requests": profile.workload}
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Baton: a model of time</title>",
        f"<style>{_STYLE}</style><h1>How long a step takes</h1>",
        f"<p>{html.escape(key.processor)}, {html.escape(key.device)}, kernels {html.escape(key.kernels)}, "
        f"{key.num_threads} threads, quantization {html.escape(key.quantization)}. {len(profile.fitted)} steps were "
        f"fitted. Two measurements of one step differ by {2 * profile.noise:.1%} (a perfect model would still be wrong "
        f"by {profile.noise:.1%}); the reference step's time spread over {profile.drift:.1%}.</p>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in verdict(profile)) + "</ul>",
        _table(profile),
        "<p class='key'>"
        + "".join(f"<span><b style='color:{colour}'>●</b> {name}</span>" for name, colour in _COLOURS.items())
        + "</p>",
    ]
    for regime in Regime:
        own = {name: [s for s in steps if s.shape.regime is regime] for name, steps in sets.items()}
        parts.append(_predicted(profile.time, regime, own) + _residuals(profile.time, regime, own))
    return "\n".join(parts) + "</html>\n"


def _table(profile: Profile) -> str:
    head = (
        "<tr><th>steps<th>regime<th>number<th>median error<th>p95<th>bias<th>plain formula: median<th>p95<th>bias</tr>"
    )
    rows = [
        f"<tr><td>{one.what}<td>{one.regime}<td>{one.model.num_steps}"
        f"<td>{one.model.median:.1%}<td>{one.model.p95:.1%}<td>{one.model.bias:+.1%}"
        f"<td>{one.quadratic.median:.1%}<td>{one.quadratic.p95:.1%}<td>{one.quadratic.bias:+.1%}</tr>"
        for one in profile.comparisons
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def _predicted(time: BatchTime, regime: Regime, sets: dict[str, list[MeasuredStep]]) -> str:
    """Predicted against measured, both logarithmic."""
    points = [(name, step.seconds, time.seconds(step.shape)) for name, steps in sets.items() for step in steps]
    if not points:
        return ""
    low, high = (f(value for _, *both in points for value in both) for f in (min, max))
    low, high = math.log10(low) - 0.05, math.log10(high) + 0.05

    def at(value: float) -> float:
        return _SIZE * (math.log10(value) - low) / (high - low)

    dots = (_dot(at(x), _SIZE - at(y), name) for name, x, y in points)
    diagonal = f"<line x1='0' y1='{_SIZE}' x2='{_SIZE}' y2='0' stroke='currentColor' stroke-dasharray='4'/>"
    ticks = [(at(value), _ms(value)) for value in _decades(low, high)]
    return _figure(
        f"{regime}: predicted (up) by measured", [diagonal, *dots], ticks, [(_SIZE - x, t) for x, t in ticks]
    )


def _residuals(time: BatchTime, regime: Regime, sets: dict[str, list[MeasuredStep]]) -> str:
    """Relative errors by new tokens."""
    points = [
        (name, step.shape.num_tokens, time.seconds(step.shape) / step.seconds - 1)
        for name, steps in sets.items()
        for step in steps
    ]
    if not points:
        return ""
    most = math.log2(max(tokens for _, tokens, _ in points) + 1)

    def up(error: float) -> float:
        return _SIZE / 2 - _SIZE / 2 * max(-1.0, min(1.0, error / 0.3))

    dots = (_dot(_SIZE * math.log2(tokens) / most, up(error), name) for name, tokens, error in points)
    zero = f"<line x1='0' y1='{_SIZE / 2}' x2='{_SIZE}' y2='{_SIZE / 2}' stroke='currentColor' stroke-dasharray='4'/>"
    across = [(_SIZE * power / most, str(2**power)) for power in range(0, int(most) + 1, 2)]
    levels = [(up(error), f"{error:+.0%}") for error in (-0.3, -0.15, 0, 0.15, 0.3)]
    return _figure(f"{regime}: error by new tokens", [zero, *dots], across, levels)


def _figure(
    title: str, marks: Sequence[str], across: Sequence[tuple[float, str]], levels: Sequence[tuple[float, str]]
) -> str:
    labels = [f"<text x='{x:.0f}' y='{_SIZE + 16}' text-anchor='middle'>{text}</text>" for x, text in across]
    labels += [f"<text x='-6' y='{y + 4:.0f}' text-anchor='end'>{text}</text>" for y, text in levels]
    frame = f"<rect width='{_SIZE}' height='{_SIZE}' fill='none' stroke='#8888'/>"
    whole = _SIZE + 2 * _MARGIN
    return (
        f"<figure><figcaption>{title}</figcaption><svg role='img' aria-label='{title}' width='{whole}' "
        f"height='{_SIZE + _MARGIN}' viewBox='{-_MARGIN} -8 {whole} {_SIZE + _MARGIN}'>"
        f"{frame}{''.join(marks)}{''.join(labels)}</svg></figure>"
    )


def _dot(x: float, y: float, name: str) -> str:
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='{_COLOURS[name]}' fill-opacity='.7'/>"


def _decades(low: float, high: float) -> Iterator[float]:
    for power in range(math.floor(low), math.ceil(high) + 1):
        for factor in (1, 3):
            if low <= math.log10(factor * 10**power) <= high:
                yield factor * 10**power


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:g} ms"
