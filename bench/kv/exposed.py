"""Part 2: what of the handoff a client sees, with and without overlap; and the orchestration in it.

Exposed handoff: time from first to second token, less one decode step. Orchestration: the decode worker's handoff time
(first token to last block) less what the connector took to move the last blocks (`Timings.transfer_ms`).
Workers have made their cache's pages (`kv_store.host_pages`) before.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from bench.kv.client import Prompts, StackClient, Timed
from bench.kv.results import Bar, Label, Results, Samples
from bench.kv.settings import QUICK_SETTLE_S, BenchSettings, Progress
from bench.kv.stacks import stack
from common.errors import StartupError

PART = "exposed"
ORCHESTRATION = "orchestration"
SETTLE_S = 15.0  # twice as long as workers without work need to make their pages
NUM_NEW = 12  # tokens: enough for the median of a decode step
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_LENGTHS = (128, 512, 2048)
# Lengths up to the first are repeated as many times as the second: a decode step differs from the next by more than the
# bar, and short prompts are cheap.
REPEATS = ((512, 8), (2048, 4), (4096, 2), (math.inf, 1))
LONG = 2048  # from here on the handoff is compared with TTFT
OVERLAP = {"overlap": "chunk", "no overlap": "end"}  # what figures are called, and --announce

TTFT_SHARE_BAR = 5.0  # percent
TAIL_BAR = 3.0  # ms beyond the transfer of the last chunk
P50_BAR, P99_BAR = 3.0, 10.0  # ms of orchestration


def run(settings: BenchSettings, results: Results, progress: Progress) -> None:
    for connector in settings.connectors:
        try:
            measure(settings, results, progress, connector)
        except StartupError as error:
            results.skipped[f"{PART}: {connector}"] = error.message
    add_bars(results)


def measure(settings: BenchSettings, results: Results, progress: Progress, connector: str) -> None:
    """Measures every length with and without overlap, as often as it takes for a median that is good to a millisecond
    or so. One stack after the other: an idle stack's threads would run in the other's decode steps. Raises
    `StartupError`."""
    for mode, announce in OVERLAP.items():
        with stack(settings, f"--connector={connector}", f"--announce={announce}") as client:
            time.sleep(QUICK_SETTLE_S if settings.quick else SETTLE_S)
            prompts = Prompts(settings.seed, PART)
            for length in lengths(client, settings):
                progress(f"{PART}: {connector}, {mode}, prompts of {length} tokens")
                num = settings.repeats * next(times for most, times in REPEATS if length <= most)
                timed = [client.generate(prompts.new(length), NUM_NEW) for _ in range(num)]
                results.add(PART, figures(timed), connector=connector, mode=mode, length=length)


def lengths(client: StackClient, settings: BenchSettings) -> list[int]:
    """The lengths to measure, cut to what the model has room for."""
    limit = client.max_model_len() - NUM_NEW
    return sorted({min(length, limit) for length in (QUICK_LENGTHS if settings.quick else LENGTHS)})


def figures(answers: Sequence[Timed]) -> dict[str, list[float]]:
    """Each quantity of every answer."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for timed in answers:
        timings = timed.report.timings
        for quantity, value in {
            "TTFT ms": timed.ttft_ms,
            "decode step ms": timed.step_ms,
            "exposed ms": timed.exposed_ms,
            "% of TTFT": timed.exposed_ms / timed.ttft_ms * 100,
            "beyond transfer ms": timed.exposed_ms - timings.transfer_ms,
            "handoff ms": timings.handoff_ms,
            "transfer ms": timings.transfer_ms,
            "orchestration ms": timings.handoff_ms - timings.transfer_ms,
            "first decode ms": timings.first_decode_ms,
            "MB moved": timed.report.num_bytes_moved / 1e6,
        }.items():
            found[quantity].append(value)
    return found


def add_bars(results: Results) -> None:
    """The worst length counts, with overlap, which is how Baton runs."""
    for connector in map(str, results.labels(PART, "connector")):
        # The longest prompt may be a little shorter than a round number: the model's context ends there.
        found = _medians(results, "% of TTFT", connector=connector, mode="overlap")
        shares = {length: share for length, share in found.items() if int(length) >= LONG}
        name = f"{connector}: exposed handoff, share of TTFT from 2,048 tokens on"
        bounds = {
            length: f"a transfer of {value:.2f} ms"
            for length, value in _medians(results, "transfer ms", connector=connector, mode="overlap").items()
        }
        add_worst(results, name, shares, TTFT_SHARE_BAR, "%", bounds)
        tails = _medians(results, "beyond transfer ms", connector=connector, mode="overlap")
        name = f"{connector}: exposed handoff beyond the last chunk's transfer"
        add_worst(results, name, tails, TAIL_BAR, "ms", bounds)
        add_orchestration_bars(results, connector)


def add_worst(
    results: Results, name: str, values: Mapping[Label, float], limit: float, unit: str, bounds: Mapping[Label, str]
) -> None:
    """The largest of `values`, which are by prompt length, as `bounds` are."""
    if not values:
        return
    length = max(values, key=lambda length: values[length])
    where, bound = f"at worst: {length} tokens", bounds.get(length, "")
    results.bars.append(
        Bar(part=PART, name=name, value=values[length], limit=limit, unit=unit, where=where, bound=bound)
    )


def _medians(results: Results, quantity: str, **labels: Label) -> dict[Label, float]:
    """The medians of that quantity, by prompt length."""
    return {one.labels["length"]: one.samples.median for one in results.find(PART, quantity, **labels)}


def add_orchestration_bars(results: Results, connector: str) -> None:
    """Over all requests that had overlap, whatever their length."""
    found = [one.samples for one in results.find(PART, "orchestration ms", connector=connector, mode="overlap")]
    if not found:
        return
    every = Samples(tuple(value for one in found for value in one.values))
    results.add(ORCHESTRATION, {"orchestration ms": every.values}, connector=connector)
    for name, value, limit in (("p50", every.median, P50_BAR), ("p99", every.percentile(0.99), P99_BAR)):
        results.bars.append(
            Bar(
                part=ORCHESTRATION,
                name=f"{connector}: handoff less transfer, {name} of {len(every.values)}",
                value=value,
                limit=limit,
                unit="ms",
            )
        )
