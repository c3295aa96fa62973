"""Part 5: chat requests beside long prompts: one worker that does both, against prefill and decode apart.

Both have the same cores, the same model and the same arrivals: Poisson, from a seed. What is measured is the chat
requests' time to first token and between tokens; the long prompts are the noise.

The two stacks take turns, phase by phase, and both stay up meanwhile. One without work takes a hundredth of a core
(polls, keepalives): too little to show here: steps are not compared to the millisecond as in `bench.kv.exposed`.
To start them anew for each phase would bring more into it: a worker that just started makes its cache's pages, with up
to half a core for some ten seconds, and for longer if it has work. So nothing is measured until they are made.
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from bench.kv.client import Prompts, StackClient, Timed
from bench.kv.results import Results
from bench.kv.settings import QUICK_SETTLE_S, BenchSettings, Progress
from bench.kv.stacks import stack
from common.errors import StartupError
from common.traffic import arrivals

PART = "colocated"
STACKS = {
    "colocated": ("--prefill=0", "--decode=0", "--both=1"),
    "disaggregated": ("--prefill=1", "--decode=1"),
}
CHAT_TOKENS, CHAT_NEW = 64, 32
LONG_TOKENS, QUICK_LONG_TOKENS, LONG_NEW = 2048, 768, 4
LONG_LOAD = 0.35  # share of one prefill core's time that long prompts take
CHATS_PER_LONG = 4.0
MAX_IN_FLIGHT = 64
MAX_RATE = 20.0  # requests a second: more would measure this client
NUM_BLOCKS = 2048  # of each worker
SETTLE_S = 20.0  # workers without work have made their pages after 15


@dataclass(slots=True, frozen=True)
class Arrival:
    at: float  # seconds since the phase's start
    is_long: bool
    prompt: list[int]


def run(settings: BenchSettings, results: Results, progress: Progress) -> None:
    """Measures with the first connector that is installed."""
    for connector in settings.connectors:
        try:
            _run(settings, results, progress, connector)
            return
        except StartupError as error:
            results.skipped[f"{PART}: {connector}"] = error.message


def _run(settings: BenchSettings, results: Results, progress: Progress, connector: str) -> None:
    phase_s, num_phases = (12.0, 1) if settings.quick else (40.0, 3)
    common = f"--connector={connector}"
    with (
        stack(settings, common, *STACKS["colocated"], num_blocks=NUM_BLOCKS) as colocated,
        stack(settings, common, *STACKS["disaggregated"], num_blocks=NUM_BLOCKS) as disaggregated,
    ):
        clients = {"colocated": colocated, "disaggregated": disaggregated}
        long_tokens = QUICK_LONG_TOKENS if settings.quick else LONG_TOKENS
        time.sleep(QUICK_SETTLE_S if settings.quick else SETTLE_S)
        long_s = _long_prompt_s(disaggregated, settings.seed, long_tokens)
        figures: dict[str, dict[str, list[float]]] = {name: {} for name in clients}
        for phase in range(num_phases):
            arrivals = list(poisson(settings.seed + phase, phase_s, LONG_LOAD / long_s, long_tokens))
            for name, client in clients.items():
                progress(f"{PART}: {name}, phase {phase + 1}/{num_phases}, {len(arrivals)} requests in {phase_s:g} s")
                for quantity, values in play(client, arrivals).items():
                    figures[name].setdefault(quantity, []).extend(values)
        for name, found in figures.items():
            results.add(PART, found, system=name, connector=connector)


def _long_prompt_s(client: StackClient, seed: int, long_tokens: int) -> float:
    prompts = Prompts(seed, "calibration")
    return statistics.median(client.generate(prompts.new(long_tokens), LONG_NEW).ttft_ms / 1000 for _ in range(3))


def poisson(seed: int, duration_s: float, long_rate: float, long_tokens: int) -> Iterator[Arrival]:
    """Arrivals in order of time: prompts of `long_tokens` at `long_rate` a second, chat requests at `CHATS_PER_LONG`
    times that. At most MAX_RATE a second in all."""
    rate = min(long_rate * (1 + CHATS_PER_LONG), MAX_RATE)
    rng, prompts = random.Random(seed), Prompts(seed, PART)
    for at in itertools.takewhile(lambda at: at < duration_s, arrivals.poisson(rate, rng)):
        is_long = rng.random() < 1 / (1 + CHATS_PER_LONG)
        yield Arrival(at, is_long, prompts.new(long_tokens if is_long else CHAT_TOKENS))


def play(client: StackClient, arrivals: list[Arrival]) -> dict[str, list[float]]:
    """Sends each request when it is due, whatever became of those before; figures of the chat requests."""
    pause = threading.Event()
    start = time.perf_counter()
    futures: list[tuple[Arrival, Future[Timed]]] = []
    with ThreadPoolExecutor(MAX_IN_FLIGHT) as pool:
        for arrival in arrivals:
            pause.wait(max(start + arrival.at - time.perf_counter(), 0.0))
            num_new = LONG_NEW if arrival.is_long else CHAT_NEW
            futures.append((arrival, pool.submit(client.generate, arrival.prompt, num_new)))
    chats = [future.result() for arrival, future in futures if not arrival.is_long]
    longs = [future.result() for arrival, future in futures if arrival.is_long]
    return {
        "TTFT ms": [one.ttft_ms for one in chats],
        "ITL ms": list(itertools.chain.from_iterable(one.itl_ms for one in chats)),
        "long prompts' TTFT ms": [one.ttft_ms for one in longs],
    }
