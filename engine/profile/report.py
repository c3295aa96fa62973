"""A profile as one HTML page without scripts: what was predicted against what was measured, and the errors."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from common.batch_time import BatchTime, Regime
from common.batch_time_fit import MeasuredStep
from common.charts import STYLE, Axis, Level, Point, Series, chart, key
from engine.profile.profile import Profile, verdict

_SIZE = 400, 380  # of a chart: nearly as high as wide, since both axes are times
_COLOURS = {"fitted": "#9aa5b1", "another run": "#2268c4", "requests": "#d1690e"}
_OWN_STYLE = "th:nth-child(2), td:nth-child(2) { text-align: left; } body > .key { margin: 1rem 0; }"
_MOST_ERROR = 0.3  # that a chart shows


def page(profile: Profile) -> str:
    machine = profile.time.key
    sets = {"fitted": profile.fitted, "another run": profile.other_run, "requests": profile.workload}
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Baton: a model of time</title>",
        f"<style>{STYLE}{_OWN_STYLE}</style><h1>How long a step takes</h1>",
        f"<p>{html.escape(machine.processor)}, {html.escape(machine.device)}, kernels {html.escape(machine.kernels)}, "
        f"{machine.num_threads} threads, quantization {html.escape(machine.quantization)}. "
        f"{len(profile.fitted)} steps were fitted. Two measurements of one step differ by {2 * profile.noise:.1%} "
        f"(a perfect model would still be wrong by {profile.noise:.1%}); the reference step's time spread over "
        f"{profile.drift:.1%}.</p>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in verdict(profile)) + "</ul>",
        _table(profile),
        key(_COLOURS),
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


def _predicted(time: BatchTime, regime: Regime, sets: Mapping[str, Sequence[MeasuredStep]]) -> str:
    """Predicted against measured, both logarithmic."""
    found = {
        name: [(1000 * step.seconds, 1000 * time.seconds(step.shape)) for step in steps] for name, steps in sets.items()
    }
    values = [value for points in found.values() for point in points for value in point]
    if not values:
        return ""
    low, high = min(values), max(values)
    return chart(
        f"{regime}: predicted by measured",
        Axis(title="measured, ms", is_log=True, low=low, high=high),
        Axis(title="predicted, ms", is_log=True, low=low, high=high),
        _dots(found),
        has_diagonal=True,
        has_key=False,
        size=_SIZE,
    )


def _residuals(time: BatchTime, regime: Regime, sets: Mapping[str, Sequence[MeasuredStep]]) -> str:
    """Relative errors by new tokens."""
    found = {
        name: [(float(step.shape.num_tokens), time.seconds(step.shape) / step.seconds - 1) for step in steps]
        for name, steps in sets.items()
    }
    most = max((tokens for points in found.values() for tokens, _ in points), default=1.0)
    return chart(
        f"{regime}: error by new tokens",
        Axis(
            title="new tokens",
            is_log=True,
            low=1.0,
            ticks=[2.0**power for power in range(0, int(math.log2(most)) + 1, 2)],
        ),
        Axis(
            title="error of the prediction",
            low=-_MOST_ERROR,
            high=_MOST_ERROR,
            ticks=(-_MOST_ERROR, -_MOST_ERROR / 2, 0, _MOST_ERROR / 2, _MOST_ERROR),
            written="{:+.0%}".format,
        ),
        _dots(found),
        [Level(0.0, "", colour="currentColor")],
        has_key=False,
        size=_SIZE,
    )


def _dots(found: Mapping[str, Sequence[Point]]) -> list[Series]:
    return [
        Series(name=name, points=points, kind="dots", radius=2, colour=_COLOURS[name]) for name, points in found.items()
    ]
