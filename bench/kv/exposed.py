"""Part 2: what of the handoff a client sees, with and without overlap; and the orchestration in it.

Exposed handoff: time from first to second token, less one decode step. Orchestration: the decode worker's handoff time
(first token to last block) less what the connector took to move the last blocks (`Timings.transfer_ms`).
Cores are kept awake (`bench.kv.awake`), and workers have made their cache's pages (`kv_store.host_pages`) before.

A decode step of a model of use differs from the next by more than the bar for what is exposed beyond the transfer. So
that is measured once more, with a swift model, where the decode engine shares its cores with nobody: what is left is
Baton's own. The first figures have all that in them, as a user of the same machine does.

A long prompt takes so long to be computed that few can be measured, and the decode worker's memory lies idle for all
that time. So long prompts are measured once more as turns of a conversation, whose beginning both workers know: the
same step over the same KV, after seconds instead of half a minute, and many times.

The decode worker idles while a prompt is computed, and a step after a pause takes longer than the next ones, with a
handoff or without. How much longer is measured for each prompt length, with an engine alone that idles as long
(`bench.kv.idle_step`). There are bars with it and without.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from baton.stack import divide_cores, usable_cores
from bench.kv.awake import awake_cores
from bench.kv.client import Prompts, StackClient, Timed
from bench.kv.idle_step import idle_steps
from bench.kv.results import Bar, Label, Results, Samples
from bench.kv.settings import BenchSettings, Progress
from bench.kv.stacks import NUM_BLOCKS, stack
from bench.kv.tiny_model import SWIFT, make_tiny_model
from common.errors import StartupError
from engine.embedded_model import ensure_model

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
KNOWN = "overlap, beginning known"
KNOWN_REPEATS = 8  # times as many repeats, from `LONG` on
TURN = 512  # tokens at the end of such a prompt, which are new: one chunk
ALONE = "overlap, swift model, engines alone"
ALONE_FACTOR = 3  # times as many repeats, as they are short
IDLE_REPEATS, IDLE_LONG_S = 6, 6.0  # times as many repeats of an idle step, where the pause is not that long

TTFT_SHARE_BAR = 5.0  # percent
TAIL_BAR = 3.0  # ms beyond the transfer of the last chunk
P50_BAR, P99_BAR = 3.0, 10.0  # ms of orchestration


def run(settings: BenchSettings, results: Results, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        tokenizer_of = ensure_model(settings.model, settings.cache_dir, progress)
        swift = make_tiny_model(Path(folder), tokenizer_of, shape=SWIFT)
        for connector in settings.connectors:
            try:
                with awake_cores():
                    run_both(settings, results, progress, connector)
                    run_alone(settings, results, progress, connector, swift)
            except StartupError as error:
                results.skipped[f"{PART}: {connector}"] = error.message
            try:
                with awake_cores():
                    measure_idle_steps(settings, results, progress, connector, tokenizer_of, "overlap", KNOWN)
                    measure_idle_steps(settings, results, progress, connector, swift, ALONE)
            except StartupError as error:
                results.skipped[f"{PART}: steps after a pause, {connector}"] = error.message
    add_bars(results)


def run_both(settings: BenchSettings, results: Results, progress: Progress, connector: str) -> None:
    """With and without overlap, on the cores that `baton up` gives each process. One after the other: an idle stack's
    threads would run in the other's decode steps. Raises `StartupError`."""
    for name, announce in OVERLAP.items():
        with stack(settings, f"--connector={connector}", f"--announce={announce}") as it:
            time.sleep(SETTLE_S)
            measure(it, name, results, settings, progress, connector)
            if name == "overlap":
                measure_known(it, results, settings, progress, connector)


def run_alone(settings: BenchSettings, results: Results, progress: Progress, connector: str, swift: Path) -> None:
    """With overlap, the decode engine on cores of its own. Raises `StartupError`."""
    with (
        beside_the_decode_engine() as flags,
        stack(settings, f"--connector={connector}", *flags, model=str(swift)) as it,
    ):
        time.sleep(SETTLE_S)
        measure(it, ALONE, results, settings, progress, connector, factor=ALONE_FACTOR)


@contextlib.contextmanager
def beside_the_decode_engine() -> Iterator[list[str]]:
    """This process, and all that start within, run on the first half of the cores: fronts, the router, this client.
    Gives flags for `baton up`, with which the engines use all: the prefill engine the first half, the decode engine the
    other. On one core, and where processes cannot be pinned, nothing changes."""
    cores = usable_cores()
    if len(cores) < 2:
        yield []
        return
    _pin(cores[: len(cores) // 2])
    try:
        yield [f"--cpu-cores={','.join(map(str, cores))}"]
    finally:
        _pin(cores)


def _pin(cores: tuple[int, ...]) -> None:
    """Every thread: those of gRPC are there already."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def measure(
    client: StackClient,
    mode: str,
    results: Results,
    settings: BenchSettings,
    progress: Progress,
    connector: str,
    *,
    factor: int = 1,
) -> None:
    """Every length, as often as it takes for a median that is good to a millisecond or so."""
    prompts = Prompts(settings.seed, PART)
    for length in lengths(client, settings):
        progress(f"{PART}: {connector}, {mode}, prompts of {length} tokens")
        num = factor * settings.repeats * next(times for most, times in REPEATS if length <= most)
        timed = [client.generate(prompts.new(length), NUM_NEW) for _ in range(num)]
        results.add(PART, figures(timed), connector=connector, mode=mode, length=length)


def measure_known(
    client: StackClient, results: Results, settings: BenchSettings, progress: Progress, connector: str
) -> None:
    """Every long length, where all but the last `TURN` tokens were in a prompt before."""
    os.sync()  # a store's earlier files: the kernel's writing of them to a disk takes a core
    prompts = Prompts(settings.seed, KNOWN)
    for length in lengths(client, settings):
        if length < LONG:
            continue
        progress(f"{PART}: {connector}, {KNOWN}, prompts of {length} tokens")
        beginning = prompts.new(length - TURN)
        client.generate(beginning, NUM_NEW)
        num = KNOWN_REPEATS * settings.repeats
        timed = [client.generate(beginning + prompts.new(TURN), NUM_NEW) for _ in range(num)]
        results.add(PART, figures(timed), connector=connector, mode=KNOWN, length=length)


def lengths(client: StackClient, settings: BenchSettings) -> list[int]:
    """As many of them as the model has room for."""
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


def measure_idle_steps(
    settings: BenchSettings, results: Results, progress: Progress, connector: str, model_dir: Path, *modes: str
) -> None:
    """For each length of these modes: an engine alone, idle for as long as the prompt took. Soon after, as machines
    differ from hour to hour. Raises `StartupError`."""
    cores = divide_cores(usable_cores(), 2)[-1]
    with idle_steps(model_dir, settings.dtype, NUM_BLOCKS, cores) as idle_step_ms:
        for mode in modes:
            for length, ttft_ms in _medians(results, "TTFT ms", connector=connector, mode=mode).items():
                idle_s = ttft_ms / 1000
                num = settings.repeats * (IDLE_REPEATS if idle_s < IDLE_LONG_S else 1)
                progress(f"{PART}: decode steps after {length} tokens and {idle_s:.1f} idle seconds")
                values = [idle_step_ms(int(length), idle_s) for _ in range(num)]
                results.add(PART, {"idle step ms": values}, mode=mode, length=length, connector=connector)


def add_bars(results: Results) -> None:
    """The worst length counts, with overlap, which is how Baton runs."""
    for connector in map(str, results.labels(PART, "connector")):
        # The longest prompt may be a little shorter than a round number: the model's context ends there.
        found = _medians(results, "% of TTFT", connector=connector, mode="overlap")
        shares = {length: share for length, share in found.items() if int(length) >= LONG}
        name = f"{connector}: exposed handoff, share of TTFT from 2,048 tokens on"
        add_worst(results, name, shares, TTFT_SHARE_BAR, "%", _transfers(results, connector, "overlap"))
        for mode, where in (("overlap", ""), (KNOWN, ", beginning known"), (ALONE, ", engines alone")):
            add_tail_bars(results, connector, mode, where)
        add_orchestration_bars(results, connector)


def add_tail_bars(results: Results, connector: str, mode: str, where: str) -> None:
    """Above the decode steps that follow, and above a decode step after an equal pause."""
    found = _medians(results, "beyond transfer ms", connector=connector, mode=mode)
    bounds = _transfers(results, connector, mode)
    idle = _medians(results, "idle step ms", connector=connector, mode=mode)
    for length, value in idle.items():
        bounds[length] = f"{bounds.get(length, '')}, a step after an equal pause: {value:.1f} ms longer by itself"
    name = f"{connector}: exposed handoff beyond the last chunk's transfer{where}"
    add_worst(results, name, found, TAIL_BAR, "ms", bounds)
    own = {length: value - idle[length] for length, value in found.items() if length in idle}
    add_worst(results, f"{name}, above a step after an equal pause", own, TAIL_BAR, "ms", {})


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
    """By prompt length."""
    return {one.labels["length"]: one.samples.median for one in results.find(PART, quantity, **labels)}


def _transfers(results: Results, connector: str, mode: str) -> dict[Label, str]:
    medians = _medians(results, "transfer ms", connector=connector, mode=mode)
    return {length: f"a transfer of {value:.2f} ms" for length, value in medians.items()}


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
