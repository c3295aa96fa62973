"""A run as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bench.serving.figures import Figures, Json, number
from bench.serving.numbers import percentile
from bench.serving.outcome import Ending, Outcome
from common.charts import STYLE, Axis, Level, Point, Series, chart

MOST_POINTS = 2000  # of a plot; more are thinned out, evenly
_ENDINGS = {
    Ending.COMPLETED: "#2c8a4b",
    Ending.FAILED: "#b0272b",
    Ending.REFUSED: "#d1690e",
    Ending.CANCELLED: "#6b7280",
}
_WARM_UP_COLOUR = "#d4a72c"
_LEAST_MS = 0.1  # that a logarithmic axis shows: events that come together have no time between them
LATENCY_ROWS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
LATENCY_COLUMNS = ("mean", "median", "p90", "p95", "p99", "max")


def page(title: str, settings: Mapping[str, Json], made: Figures, runs: Sequence[Sequence[Outcome]]) -> str:
    """`runs`: the requests of each repeat. The plots over time show the first."""
    targets = settings.get("goodput")
    limits = {name: float(str(value)) for name, value in targets.items()} if isinstance(targets, dict) else {}
    warm_up_s = number(settings, "warmup_seconds")
    counted = [outcome for run in runs for outcome in run if outcome.due_s >= warm_up_s]
    first = runs[0] if runs else ()
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>",
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>",
        _verdict(made),
        f"<div class='beside'>{summary_table(made)}<div>{latency_table(made)}{_errors(made)}</div></div>",
        _over_time(first, limits, warm_up_s),
        _progress(first),
        *_shares(counted, limits),
        _lags(first),
        _settings(settings),
    ]
    return "\n".join(part for part in parts if part) + "</html>\n"


def _verdict(made: Figures) -> str:
    if made.get("valid"):
        return (
            "<p class='good'>Valid: the client kept up. It sent requests "
            f"{number(made, 'p99_send_lag_ms'):.1f} ms late in the 99th percentile and took "
            f"{number(made, 'client_cpu_utilization'):.0%} of a core.</p>"
        )
    reasons = made.get("invalid_reasons")
    lines = "".join(f"<li>{html.escape(str(reason))}</li>" for reason in reasons) if isinstance(reasons, list) else ""
    return f"<div class='bad'><b>Invalid:</b> the client was the bottleneck.<ul>{lines}</ul></div>"


def error_rows(made: Figures) -> Iterator[tuple[str, str]]:
    """Why requests did not complete, and how many for this reason."""
    errors = made.get("error_counts")
    for reason, count in errors.items() if isinstance(errors, dict) else ():
        yield f"{number({'': count}, ''):.4g}", reason


def _errors(made: Figures) -> str:
    lines = "".join(f"<li>{count}: {html.escape(reason)}</li>" for count, reason in error_rows(made))
    return f"<p>Did not complete:</p><ul>{lines}</ul>" if lines else ""


def summary_rows(made: Figures) -> Iterator[tuple[str, str]]:
    """What is told about a run besides its latencies: a name and its value."""
    for name, text in (
        ("completed", "completed"), ("failed", "failed"), ("refused", "refused (429, 503)"),
        ("cancelled", "cancelled by the client"), ("not_sent", "not sent"), ("warmup_completed", "warm-up, completed"),
    ):  # fmt: skip
        if made.get(name) or name in ("completed", "failed", "refused"):
            yield text, f"{number(made, name):.4g}"
    for name, text in (
        ("duration", "duration, s"),
        ("offered_rate", "requests/s that were due"),
        ("delivered_rate", "requests/s that were sent"),
        ("request_throughput", "requests/s completed"),
        ("request_goodput", "good requests/s"),
        ("token_goodput", "tokens/s of good requests"),
        ("good_request_fraction", "share of good requests"),
        ("output_throughput", "output tokens/s"),
        ("total_token_throughput", "all tokens/s"),
        ("max_concurrent_requests", "requests at a time, most"),
    ):
        if isinstance(made.get(name), int | float):
            yield text, f"{number(made, name):,.4g}" + _bounds(made, name)
    num_input = number(made, "total_input_tokens")
    if num_input and made.get("total_cached_tokens"):
        yield "prompt tokens from a prefix cache", f"{number(made, 'total_cached_tokens') / num_input:.1%}"


def _bounds(made: Figures, name: str) -> str:
    """` ± 0.3`, if there are repeats."""
    bounds = made.get("confidence_95")
    found = bounds.get(name) if isinstance(bounds, dict) else None
    if not isinstance(found, list):
        return ""
    return f" ± {(float(str(found[1])) - float(str(found[0]))) / 2:.3g}"


def latency_rows(made: Figures) -> Iterator[tuple[str, list[str]]]:
    """For each latency that was measured, its columns in milliseconds."""
    for name, title in LATENCY_ROWS.items():
        if f"mean_{name}_ms" in made:
            keys = [f"{column}_{name}_ms" for column in LATENCY_COLUMNS]
            mean, *others = (f"{number(made, key):,.1f}" for key in keys)
            yield title, [mean + _bounds(made, keys[0]), *others]


def summary_table(made: Figures) -> str:
    rows = "".join(f"<tr><td>{html.escape(name)}<td>{value}</tr>" for name, value in summary_rows(made))
    return f"<table>{rows}</table>"


def latency_table(made: Figures) -> str:
    head = "<tr><th>milliseconds" + "".join(f"<th>{column}" for column in LATENCY_COLUMNS) + "</tr>"
    rows = "".join(f"<tr><td>{name}<td>{'<td>'.join(values)}</tr>" for name, values in latency_rows(made))
    return f"<div class='wide'><table>{head}{rows}</table></div>" if rows else ""


def _over_time(outcomes: Sequence[Outcome], limits: Mapping[str, float], warm_up_s: float) -> str:
    """TTFT of each request by when it was due; what did not complete lies on the axis."""
    groups = [("warm-up", _WARM_UP_COLOUR, [one for one in outcomes if one.due_s < warm_up_s])]
    counted = [one for one in outcomes if one.due_s >= warm_up_s]
    for ending, colour in _ENDINGS.items():
        groups.append((str(ending), colour, [one for one in counted if one.ending is ending]))
    series = []
    for name, colour, own in groups:
        points = [(one.due_s, 1000 * one.ttft_s if one.ending is Ending.COMPLETED else 0.0) for one in own]
        series.append(Series(name=name, points=thinned(points), kind="dots", colour=colour))
    levels = [Level(limits["ttft"], "target")] if "ttft" in limits else []
    return chart("TTFT of each request", Axis(title="due, s"), Axis(title="ms"), series, levels)


def _progress(outcomes: Sequence[Outcome]) -> str:
    """Output tokens of each second, and requests at a time."""
    if not outcomes:
        return ""
    end = max(one.ended_s for one in outcomes)
    width = max(end / 100, 0.1)
    tokens: Counter[int] = Counter(int(at / width) for one in outcomes for at in one.token_times_s)
    rates = [(width * (place + 0.5), tokens[place] / width) for place in range(math.ceil(end / width))]
    changes = sorted([(one.sent_s, 1) for one in outcomes] + [(one.ended_s, -1) for one in outcomes])
    at_once: list[Point] = [(0.0, 0.0)]
    for at, change in changes:
        at_once.append((at, at_once[-1][1] + change))
    return chart(
        "Events with tokens", Axis(title="s"), Axis(title="per second"), [Series(name="events", points=rates)]
    ) + chart(
        "Requests at a time",
        Axis(title="s"),
        Axis(title="requests"),
        [Series(name="requests", points=thinned(at_once), kind="steps")],
    )


def _shares(outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> Iterator[str]:
    """Of each latency, the share of values up to it."""
    completed = [one for one in outcomes if one.ending is Ending.COMPLETED]
    values = {
        "ttft": [one.ttft_s for one in completed],
        "tpot": [one.tpot_s for one in completed if one.tpot_s is not None],
        "itl": [gap for one in completed for gap in one.itls_s],
        "e2el": [one.e2el_s for one in completed],
    }
    for name, found in values.items():
        if not found:
            continue
        ordered = sorted(max(1000 * value, _LEAST_MS) for value in found)
        # Evenly over the ranks, and the tail as it is.
        percents = [number_ / 2 for number_ in range(200)] + [99.5 + number_ / 20 for number_ in range(11)]
        points = [(percentile(ordered, min(percent, 100)), min(percent, 100)) for percent in percents]
        title = LATENCY_ROWS[name]
        if name in limits:
            good = sum(value <= limits[name] for value in ordered) / len(ordered)
            title += f": {good:.1%} within {limits[name]:g} ms"
        yield chart(
            title,
            Axis(title="ms", is_log=True),
            Axis(title="% of values", high=100),
            [Series(name=name, points=points)],
        )


def _lags(outcomes: Sequence[Outcome]) -> str:
    points = [(one.due_s, 1000 * one.send_lag_s) for one in outcomes]
    series = [Series(name="lag", points=thinned(points), kind="dots")]
    return chart("How late the client sent requests", Axis(title="due, s"), Axis(title="ms"), series)


def _settings(settings: Mapping[str, Json]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}<td>{html.escape(str(value))}</tr>"
        for name, value in settings.items()
        if value not in (None, "", {}, [])
    )
    return f"<h2>Settings</h2><table>{rows}</table>"


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most `MOST_POINTS` of them, evenly, with the last one."""
    if len(points) <= MOST_POINTS:
        return points
    step = len(points) / MOST_POINTS
    return [points[int(index * step)] for index in range(MOST_POINTS)] + [points[-1]]
