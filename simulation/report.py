"""Results as one HTML page without scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence

from simulation.scenario import Result

_STYLE = """
:root { color-scheme: light dark; --line: #8888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .2rem .8rem; text-align: right; white-space: nowrap; } th:first-child { text-align: left; }
tr { border-bottom: 1px solid var(--line); } figure { display: inline-block; margin: 0 1rem 1rem 0; }
figcaption { font-weight: 600; } text { fill: currentColor; font-size: 11px; }
svg { overflow: visible; } .key span { margin-right: 1.2rem; }
"""


def page(results: Sequence[Result]) -> str:
    sources = dict.fromkeys(source for one in results for source in one.sources)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Baton: a simulated fleet</title>",
        f"<style>{_STYLE}</style><h1>What the fleet would do</h1>",
        f"<p>Times of steps: {html.escape('; '.join(sources))}.</p>",
        _table(results),
    ]
    return "\n".join(parts) + "</html>\n"


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
