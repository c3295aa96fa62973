"""What is measured, and what should come of it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import uvloop

from bench.kv.report import Tables
from bench.kv.results import Bar, Label, Results
from bench.kv.settings import Progress
from bench.load.clients import Asked, Client
from bench.load.percentiles import percentile
from bench.router.clients import Endpoint
from bench.router.load import closed_loop, open_loop
from bench.router.open_streams import measure_open_streams
from bench.router.process_cost import cpu_s
from bench.router.systems import BATON, Spec, System, router, workers
from common.config import DEFAULT_MODEL, default_cache_dir
from common.errors import BatonError
from common.process.open_files import allow_open_files
from engine.loading.embedded_model import ensure_model

BAR_STREAMS = 32
OPEN_WORKERS = 4
TABLES: Tables = {
    "cpu": (
        "CPU time of the router; TTFT with all streams always busy",
        ("system", "interface", "processes", "streams", "events"),
        (
            "requests per CPU second", "tokens per CPU second", "µs per request", "µs per token", "events per token",
            "added TTFT p50 ms", "added TTFT p99 ms",
        ),
    ),
    "ratio": (
        "Per CPU second, as a multiple of what Baton does (one process)",
        ("system", "streams"),
        ("requests", "tokens"),
    ),
    "ttft": (
        "What the router adds to TTFT at half load",
        ("system", "interface", "processes", "events"),
        ("requests per second", "events per token", "added TTFT p50 ms", "added TTFT p99 ms"),
    ),
    "open": (
        "Open streams",
        ("system", "interface", "processes", "streams"),
        (
            "peak MiB", "KiB a stream", "CPU, % of a core", "one more request p50 ms", "one more request p99 ms",
            "token late p99 ms",
        ),
    ),
}  # fmt: skip
_BARS: tuple[tuple[str, str, dict[str, Label], float, str], ...] = (  # part, quantity, labels, limit, unit
    ("cpu", "µs per request", {"streams": BAR_STREAMS}, 1e6 / 1400, "µs"),
    ("cpu", "µs per token", {"streams": BAR_STREAMS}, 1e6 / 25_000, "µs"),
    ("ttft", "added TTFT p50 ms", {}, 1.5, "ms"),
    ("ttft", "added TTFT p99 ms", {}, 8.0, "ms"),
    ("open", "peak MiB", {"streams": 10_000}, 768.0, "MiB"),
)
ONE_EVENT = 0.97
"""Events per token from which on a stream has one event for each token. Below it a router coalesces: its figures are of
other work."""
_WARM_UP_S = 0.5

Figures = dict[str, list[float]]  # quantity: samples


@dataclass(slots=True, frozen=True, kw_only=True)
class RouterBench:
    parts: tuple[str, ...]
    streams: tuple[int, ...]
    interfaces: tuple[str, ...]
    processes: tuple[int, ...]
    peers: dict[str, str]  # name: command
    tokens: int  # of each stream
    seconds: float  # of each figure
    step_ms: float  # between two tokens of a stream
    open_step_ms: float  # likewise in the part "open"
    rate: float | None  # requests per second in the part "ttft"; half of what a CPU second serves if None
    repeats: int

    def specs(self) -> list[Spec]:
        baton = [Spec(BATON, name, number) for name in self.interfaces for number in self.processes]
        return baton + [Spec(name, "rest") for name in self.peers]


def run_parts(bench: RouterBench, results: Results, progress: Progress) -> None:
    """A router that fails is told in `results`, and the others go on."""
    allow_open_files(2 * max(bench.streams) + 1000)  # a peer has two connections for each stream
    tokenizer_dir = ensure_model(DEFAULT_MODEL, default_cache_dir(), progress)
    if {"cpu", "ttft"} & {*bench.parts}:
        _run_with_all(bench, tokenizer_dir, results, progress)
        add_ratios(results)
    if "open" in bench.parts:
        _run_open(bench, tokenizer_dir, results, progress)
    add_bars(results)


def _run_with_all(bench: RouterBench, tokenizer_dir: Path, results: Results, progress: Progress) -> None:
    """All routers are up at the same time, and take turns."""
    found: dict[tuple[str, tuple[tuple[str, Label], ...]], Figures] = {}

    def measure(part: str, labels: dict[str, Label], figures: Callable[[], Figures]) -> None:
        name = _name(part, labels)
        progress(name)
        with _failure_told(name, results, progress):
            of = found.setdefault((part, tuple(labels.items())), defaultdict(list))
            for quantity, values in figures().items():
                of[quantity] += values

    with contextlib.ExitStack() as stack:
        behind: dict[bool, list[Endpoint]] = {}
        systems: list[System] = []
        for spec in bench.specs():
            is_baton = spec.name == BATON
            with _failure_told(_name("start", spec.labels()), results, progress):
                if is_baton not in behind:
                    behind[is_baton] = stack.enter_context(workers(spec.name, tokenizer_dir, bench.step_ms, 1))
                running = router(spec, behind[is_baton], bench.peers, max(*bench.streams, 1000))
                systems.append(stack.enter_context(running))
        rates = {} if bench.rate is None else dict.fromkeys(bench.specs(), bench.rate)
        for _ in range(bench.repeats):
            for system in systems:
                labels = system.spec.labels()
                for num in bench.streams if "cpu" in bench.parts else ():
                    measure("cpu", {**labels, "streams": num}, partial(measure_cpu, system, num, bench))
                if "ttft" in bench.parts:
                    measure("ttft", labels, partial(measure_ttft, system, rates, bench))
    for (part, of_labels), figures in found.items():
        if not figures:  # it failed each time
            continue
        events = "one a token" if median(figures["events per token"]) >= ONE_EVENT else "coalesced"
        results.add(part, figures, **dict(of_labels), events=events)


def _run_open(bench: RouterBench, tokenizer_dir: Path, results: Results, progress: Progress) -> None:
    """Each with a router of its own, so that its memory is what these streams take."""
    step_s = bench.open_step_ms / 1000
    for spec in bench.specs():
        for num in bench.streams:
            labels = {**spec.labels(), "streams": num}
            progress(name := _name("open", labels))
            with (
                _failure_told(name, results, progress),
                workers(spec.name, tokenizer_dir, bench.open_step_ms, OPEN_WORKERS) as behind,
                router(spec, behind, bench.peers, num) as system,
            ):
                results.add("open", measure_open_streams(system, num, step_s, bench.seconds), **labels)


def measure_cpu(system: System, num_streams: int, bench: RouterBench) -> Figures:
    figures: Figures = {}
    asked: list[Asked] = []
    for what, max_tokens in (("request", 1), ("token", bench.tokens)):
        _load(system.endpoint, partial(closed_loop, num_streams=num_streams, max_tokens=max_tokens, seconds=_WARM_UP_S))
        before = cpu_s(system.pid)
        measured = partial(closed_loop, num_streams=num_streams, max_tokens=max_tokens, seconds=bench.seconds)
        asked = _load(system.endpoint, measured)
        used_s = cpu_s(system.pid) - before
        num = len(asked) * max_tokens
        figures[f"{what}s per CPU second"] = [num / used_s]
        figures[f"µs per {what}"] = [1e6 * used_s / num]
    return figures | _of_streams(asked, system, bench)


def measure_ttft(system: System, rates: dict[Spec, float], bench: RouterBench) -> Figures:
    """Measures at the rate that `rates` has for the system. If `rates` has none, half of what the system can do is
    added."""
    if system.spec not in rates:
        before = cpu_s(system.pid)
        all_busy = partial(closed_loop, num_streams=BAR_STREAMS, max_tokens=bench.tokens, seconds=bench.seconds)
        num = len(_load(system.endpoint, all_busy))
        rates[system.spec] = system.spec.processes * num / (cpu_s(system.pid) - before) / 2
    rate = rates[system.spec]
    at_rate = partial(open_loop, rate=rate, max_tokens=bench.tokens, seconds=bench.seconds)
    return {"requests per second": [rate], **_of_streams(_load(system.endpoint, at_rate), system, bench)}


def _load(endpoint: Endpoint, load: Callable[[Client], Coroutine[None, None, list[Asked]]]) -> list[Asked]:
    """Runs `load` in an event loop of its own, with connections of its own."""

    async def run_load() -> list[Asked]:
        client = endpoint.connect()
        try:
            return await load(client)
        finally:
            await client.close()

    return uvloop.run(run_load())


def _of_streams(asked: list[Asked], system: System, bench: RouterBench) -> Figures:
    """Added TTFT is what is more than a worker takes that is asked directly, for one request after the other."""
    one_by_one = partial(closed_loop, num_streams=1, max_tokens=2, seconds=bench.seconds / 4)
    directly = _load(system.worker, one_by_one)
    through, alone = ([1000 * one.ttft_s for one in some] for some in (asked, directly))
    p50, p99 = (percentile(through, share) - percentile(alone, share) for share in (0.5, 0.99))
    events = sum(one.num_events for one in asked) / (len(asked) * bench.tokens)
    return {"events per token": [events], "added TTFT p50 ms": [p50], "added TTFT p99 ms": [p99]}


def add_ratios(results: Results) -> None:
    """What each peer does in a CPU second, as a multiple of what one process of Baton does over REST."""
    for streams in results.labels("cpu", "streams"):
        for peer in results.labels("cpu", "system", streams=streams):
            ratios: Figures = {}
            for what in ("requests", "tokens"):
                quantity = f"{what} per CPU second"
                own = results.get("cpu", quantity, system=BATON, interface="rest", processes=1, streams=streams)
                its = results.get("cpu", quantity, system=peer, streams=streams)
                if peer != BATON and own is not None and its is not None:
                    ratios[what] = [its.median / own.median]
            results.add("ratio", ratios, system=peer, streams=streams)


def add_bars(results: Results) -> None:
    """Adds the bars for one process of Baton over REST. What it costs per token only counts with an event for each
    token."""
    for part, quantity, labels, limit, unit in _BARS:
        found = results.get(part, quantity, system=BATON, interface="rest", processes=1, **labels)
        if found is not None:
            where = f"{labels['streams']} streams" if labels else "half load"
            name = f"REST, one process: {quantity.removesuffix(f' {unit}')}"
            results.bars.append(Bar(part=part, name=name, value=found.median, limit=limit, unit=unit, where=where))
    found = results.get("cpu", "events per token", system=BATON, interface="rest", processes=1, streams=BAR_STREAMS)
    if found is not None:
        name, where = "REST, one process: tokens with an event of their own", f"{BAR_STREAMS} streams"
        share, limit = 100 * found.median, 100 * ONE_EVENT
        results.bars.append(Bar(part="cpu", name=name, value=share, limit=limit, unit="%", where=where, is_floor=True))


def _name(part: str, labels: Mapping[str, Label]) -> str:
    words = (f"{value} {key}" if isinstance(value, int) else value for key, value in labels.items())
    return f"{part}: {', '.join(words)}"


@contextlib.contextmanager
def _failure_told(what: str, results: Results, progress: Progress) -> Iterator[None]:
    """Baton's own errors, alone or several at once, keep nothing else from being measured."""
    try:
        yield
    except* BatonError as errors:
        results.failed[what] = message = str(_first(errors))
        progress(f"{what}: failed: {message}")


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
