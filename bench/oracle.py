"""The fewest workers that would have served a trace as well as the planner did: what only the future can tell.

The oracle sees all arrivals in advance. It is given a number of workers for each window, found by search: from the
planner's own numbers, and from the offered load times a factor, workers are taken out of one window after another while
the planner's share of requests within SLO is met. Its workers start early enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from router.autoscaler.signals import FleetSignals
from simulation.rough_fleet import Hardware, Job, Outcome, Slo, simulate


def best_batch(hardware: Hardware, slo: Slo) -> int:
    """Most requests with which a decode worker still meets the TPOT."""
    return max(1, int((slo.tpot_s - hardware.step_s) / hardware.step_per_request_s))


def offered(jobs: Sequence[Job], hardware: Hardware, slo: Slo, window_s: float) -> list[tuple[float, float]]:
    """Workers' worth of load in each window, as only the future can tell."""
    num_windows = math.ceil((jobs[-1].arrival + 1) / window_s)
    batch = best_batch(hardware, slo)
    step = hardware.step_s + hardware.step_per_request_s * batch
    loads = [[0.0, 0.0] for _ in range(num_windows)]
    for job in jobs:
        window = loads[int(job.arrival / window_s)]
        window[0] += job.num_prompt_tokens / hardware.prefill_rate / window_s
        window[1] += job.num_output_tokens * step / batch / window_s
    return [(prefill, decode) for prefill, decode in loads]


def run_oracle(
    jobs: Sequence[Job],
    hardware: Hardware,
    slo: Slo,
    planned: Outcome,
    history: Sequence[tuple[int, int]],
    window_s: float,
) -> Outcome:
    loads = offered(jobs, hardware, slo, window_s)

    def outcome(counts: list[list[int]]) -> Outcome:
        def plan(now: float, _read: Callable[[], FleetSignals]) -> tuple[int, int]:
            prefill, decode = counts[min(int(now / window_s), len(counts) - 1)]
            return prefill, decode

        played = simulate(jobs, hardware, slo, plan, (counts[0][0], counts[0][1]), startup_s=0.0)
        startup = _startup_hours(counts, hardware)
        return replace(
            played, prefill_hours=played.prefill_hours + startup[0], decode_hours=played.decode_hours + startup[1]
        )

    def scaled(factors: tuple[float, float]) -> list[list[int]]:
        return [[max(1, math.ceil(load * factor)) for load, factor in zip(one, factors, strict=True)] for one in loads]

    # Two factors, because the roles miss their SLOs for different reasons; the cheapest pair that is good enough.
    grid = [*(0.8 + 0.1 * step for step in range(15)), 2.5, 3.0, 4.0]
    pairs = sorted(itertools.product(grid, grid), key=lambda pair: sum(map(sum, scaled(pair))))
    starts = [_by_window(history, window_s, len(loads))]
    good = (counts for counts in map(scaled, pairs) if outcome(counts).slo_ok >= planned.slo_ok)
    starts.extend(itertools.islice(good, 1))
    found = [_trimmed(counts, outcome, planned.slo_ok) for counts in starts]
    return min((one for one in found if one.slo_ok >= planned.slo_ok), key=lambda one: one.hours)


def _by_window(history: Sequence[tuple[int, int]], window_s: float, num_windows: int) -> list[list[int]]:
    """What the planner had, at most: whatever else is found, the oracle can do no worse."""
    width = int(window_s)
    windows = [history[index * width : (index + 1) * width] or history[-1:] for index in range(num_windows)]
    return [[max(one[role] for one in window) for role in (0, 1)] for window in windows]


def _trimmed(counts: list[list[int]], outcome: Callable[[list[list[int]]], Outcome], slo_ok: float) -> Outcome:
    """Takes a worker out of one window after another, for as long as the outcome stays good and gets cheaper."""
    best, improved = outcome(counts), True
    while improved:
        improved = False
        for index, role in itertools.product(range(len(counts)), (0, 1)):
            while counts[index][role] > 1:
                counts[index][role] -= 1
                trial = outcome(counts)
                if trial.slo_ok < slo_ok or trial.hours >= best.hours:
                    counts[index][role] += 1
                    break
                best, improved = trial, True
    return best


def _startup_hours(counts: Sequence[Sequence[int]], hardware: Hardware) -> tuple[float, float]:
    """Its workers are ready when they are needed, and paid from when they were asked for."""
    hours = [0.0, 0.0]
    for before, after in itertools.pairwise(counts):
        for role in (0, 1):
            hours[role] += max(0, after[role] - before[role]) * hardware.startup_s / 3600
    return hours[0], hours[1]
