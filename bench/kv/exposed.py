"""Part 2: what of the handoff a client sees, with and without overlap; and the orchestration in it.

Exposed handoff: time from first to second token, less one decode step. Orchestration: the decode worker's handoff time
(first token to last block) less what the connector took to move the last blocks (`Timings.transfer_ms`).
Cores are kept awake (`bench.kv.awake`), and workers have made their cache's pages (`kv_store.host_pages`) before.

A decode step of a model of use differs from the next by more than the bar for what is exposed beyond the transfer. So
that is measured once more, with a swift model, where the decode engine shares its cores with nobody: what is left is
Baton's own. The first figures have all that in them, as a user of the same machine does.

A long prompt takes so long to be computed that few can be measured, and the decode worker's memory lies idle for all
that time. So long prompts are measured once more as turns of a conversation, whose beginning both workers know: the
same step over the same KV, after seconds instead of half a minute, and many times. And there is what the machine alone
adds for memory that has lain idle (`bench.kv.idle_memory`).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.stack import usable_cores
from bench.kv.awake import awake_cores
from bench.kv.client import Prompts, StackClient, Timed
from bench.kv.idle_memory import idle_memory_ms
from bench.kv.results import Bar, Label, Results, Samples
from bench.kv.settings import BenchSettings, Progress
from bench.kv.stacks import stack
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
IDLE = "control: memory left idle"
ALONE_FACTOR = 3  # times as many repeats, as they are short

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
    with awake_cores():
        measure_idle_memory(settings, results, progress)
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


def measure_idle_memory(settings: BenchSettings, results: Results, progress: Progress) -> None:
    """As much as each long prompt's KV, idle for as long as it took to be computed."""
    for length in results.labels(PART, "length", mode="overlap"):
        labels: dict[str, Label] = {"mode": "overlap", "length": length}
        moved, ttft = results.get(PART, "MB moved", **labels), results.get(PART, "TTFT ms", **labels)
        if int(length) < LONG or moved is None or ttft is None:
            continue
        progress(f"{PART}: {moved.median:.0f} MB of memory that lie idle for {ttft.median / 1000:.0f} s")
        values = [idle_memory_ms(int(moved.median * 1e6), ttft.median / 1000) for _ in range(settings.repeats)]
        results.add(PART, {"idle memory ms": values}, mode=IDLE, length=length)


def add_bars(results: Results) -> None:
    """The worst length counts, with overlap, which is how Baton runs."""
    tail = "exposed handoff beyond the last chunk's transfer"
    bars = (
        ("exposed handoff, share of TTFT from 2,048 tokens on", "overlap", "% of TTFT", TTFT_SHARE_BAR, "%", LONG),
        (tail, "overlap", "beyond transfer ms", TAIL_BAR, "ms", 0),
        (f"{tail}, beginning known", KNOWN, "beyond transfer ms", TAIL_BAR, "ms", 0),
        (f"{tail}, engines alone", ALONE, "beyond transfer ms", TAIL_BAR, "ms", 0),
    )
    for connector in results.labels(PART, "connector"):
        for name, mode, quantity, limit, unit, shortest in bars:
            labels = {"connector": connector, "mode": mode}
            # The longest prompt may be a little shorter than a round number: the model's context ends there.
            found = [one for one in results.find(PART, quantity, **labels) if int(one.labels["length"]) >= shortest]
            if not found:
                continue
            worst = max(found, key=lambda record: record.samples.median)
            length = worst.labels["length"]
            bounds = []
            if transfer := results.get(PART, "transfer ms", **labels, length=length):
                bounds.append(f"a transfer of {transfer.median:.2f} ms")
            idle = results.get(PART, "idle memory ms", mode=IDLE, length=length)
            if idle is not None and mode == "overlap":
                bounds.append(f"memory that lay idle as long, without Baton: {idle.median:.1f} ms")
            results.bars.append(
                Bar(
                    part=PART,
                    name=f"{connector}: {name}",
                    value=worst.samples.median,
                    limit=limit,
                    unit=unit,
                    where=f"at worst: {length} tokens",
                    bound=", ".join(bounds),
                )
            )
        add_orchestration_bars(results, str(connector))


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
