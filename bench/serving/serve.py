"""What `baton bench serve` does with its flags."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from bench.serving.console import print_run, progress_bar
from bench.serving.figures import Figures, Json, number
from bench.serving.files import check_outputs, detailed_json, settings_json, write_outputs
from bench.serving.find_rate import Found, find_rate
from bench.serving.measure import Measured, MeasureSettings, measure
from bench.serving.options import Options
from common.errors import ConfigError


@dataclass(slots=True, frozen=True, kw_only=True)
class Serve:
    options: Options
    outputs: Sequence[str]
    as_json: bool
    is_detailed: bool
    finds_rate: bool
    good_fraction: float
    tolerance: float


async def run_serve(asked: Serve) -> int:
    """0, or 1 if nothing completed or the client was the bottleneck. Raises `BatonError`."""
    check_outputs(asked.outputs)
    options = asked.options
    if asked.finds_rate:
        return await _run_search(asked)
    measured = await measure(options.target, options.settings, options.texts, progress_bar)
    _report(asked, options.settings, measured, {})
    return 0 if measured.figures["valid"] and number(measured.figures, "completed") else 1


async def _run_search(asked: Serve) -> int:
    options = asked.options
    settings = options.settings
    if not settings.targets:
        raise ConfigError("--find-rate", "needs --goodput, which says what has to hold")
    if settings.load.ramp_up_strategy is not None:
        raise ConfigError("--find-rate", "does not go with --ramp-up-strategy")
    console = Console(stderr=True)
    measured: dict[float, Measured] = {}

    async def at(rate: float) -> Figures:
        words = options.texts.salted(f"{rate:g}/s")
        measured[rate] = await measure(options.target, settings.at_rate(rate), words, progress_bar)
        made = measured[rate].figures
        console.print(
            f"{rate:.4g} requests/s: {number(made, 'good_request_fraction'):.1%} good, "
            f"TTFT p99 {number(made, 'p99_ttft_ms'):.0f} ms, TPOT p99 {number(made, 'p99_tpot_ms'):.1f} ms",
            highlight=False,
        )
        return made

    start = 1.0 if math.isinf(settings.load.request_rate) else settings.load.request_rate
    found = await find_rate(at, start=start, good_fraction=asked.good_fraction, tolerance=asked.tolerance)
    # If no rate held, the last one is shown: why it did not.
    rate = found.rate if found.best is not None else found.probes[-1].rate
    _report(asked, settings.at_rate(rate), measured[rate], _search_json(found))
    if found.reason:
        console.print(found.reason, highlight=False)
    return 0 if found.best is not None else 1


def _search_json(found: Found) -> dict[str, Json]:
    return {
        "max_rate": found.rate,
        "max_rate_reason": found.reason,
        "probes": [
            {
                "request_rate": probe.rate,
                "holds": probe.holds,
                "good_request_fraction": probe.figures.get("good_request_fraction"),
                "request_goodput": probe.figures.get("request_goodput"),
                "p99_ttft_ms": probe.figures.get("p99_ttft_ms"),
                "p99_tpot_ms": probe.figures.get("p99_tpot_ms"),
                "valid": probe.figures.get("valid"),
            }
            for probe in found.probes
        ],
    }


def _report(asked: Serve, settings: MeasureSettings, measured: Measured, search: dict[str, Json]) -> None:
    options = asked.options
    shown = settings_json(options.target, settings, measured, options.tokenizer)
    whole: dict[str, Json] = {**shown, **search, **measured.figures}
    if asked.is_detailed:
        whole |= detailed_json(measured.runs[0], warm_up_s=settings.warmup_seconds)
    write_outputs(asked.outputs, whole, shown, measured)
    if asked.as_json:
        print(json.dumps(whole, ensure_ascii=False))
        return
    console = Console()
    print_run(shown, measured.figures, console)
    if search:
        console.print(f"highest rate that holds the targets: {search['max_rate']:.4g} requests/s", highlight=False)
    for path in asked.outputs:
        console.print(f"wrote {path}", highlight=False)
