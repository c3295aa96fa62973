"""The planner on recorded traffic, against an oracle that knows the future.

    python -m bench.planner [TRACE.jsonl ...] [--json]

A trace has one JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens). Without one, a day of
synthetic traffic is made, pressed into an hour.

Both sides drive the same simulated fleet: prefill workers compute their queues in order, decode workers share each step
among their requests (time per token grows with the batch), a new worker serves `startup` seconds after it was
asked for, and one that is to go finishes what it has. Every second from asking for a worker to its end is paid.

The oracle sees all arrivals in advance. It is given a number of workers for each window, found by search: from the
planner's own numbers, and from the offered load times a factor, workers are taken out of one window after another while
the planner's share of requests within SLO is met. Its workers start early enough. What is compared is worker-hours at
equal SLO attainment.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from common.types import WorkerRole
from router.autoscaler.arrivals import ArrivalRate
from router.autoscaler.planner import Bounds, Planner, PlannerOptions
from router.autoscaler.rules import TargetRules, Targets
from router.autoscaler.signals import FleetSignals, RoleSignals

ARRIVAL_WINDOW_S = 60.0


@dataclass(slots=True, frozen=True)
class Job:
    arrival: float  # seconds
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Hardware:
    prefill_rate: float = 8000.0  # prompt tokens/s of one worker
    step_s: float = 0.015  # decode step of an empty batch
    step_per_request_s: float = 0.001  # and for each request in it
    kv_tokens: float = 400_000.0  # KV capacity of a decode worker
    startup_s: float = 30.0


@dataclass(slots=True, frozen=True, kw_only=True)
class Slo:
    ttft_s: float = 10.0
    tpot_s: float = 0.035


@dataclass(slots=True, eq=False)
class PrefillWorker:
    since: float  # paid from here
    ready: float
    free_at: float = 0.0
    queue: list[tuple[float, float, int]] = field(default_factory=list)  # start, end, tokens; in order
    last: float | None = None  # nothing new from here on


class Prefill:
    """Requests go to the worker that is free first; nothing moves later."""

    def __init__(self, hardware: Hardware, num_workers: int) -> None:
        self._hardware = hardware
        self.workers = [PrefillWorker(0.0, 0.0) for _ in range(num_workers)]
        self.paid_s = 0.0

    def add(self, now: float, job: Job) -> float:
        """Returns when the first token is there."""
        open_workers = [w for w in self.workers if w.last is None]
        worker = min(open_workers, key=lambda w: max(w.free_at, w.ready, now))
        start = max(worker.free_at, worker.ready, now)
        worker.free_at = start + job.num_prompt_tokens / self._hardware.prefill_rate
        worker.queue.append((start, worker.free_at, job.num_prompt_tokens))
        return worker.free_at

    def scale(self, now: float, desired: int, *, startup_s: float) -> None:
        running = [w for w in self.workers if w.last is None]
        for _ in range(desired - len(running)):
            self.workers.append(PrefillWorker(now, now + startup_s))
        emptiest_first = sorted(running, key=lambda w: (w.ready <= now, w.free_at))
        for worker in emptiest_first[: max(len(running) - max(desired, 1), 0)]:
            worker.last = now
            self.paid_s += max(now, worker.free_at) - worker.since
        self.workers = [w for w in self.workers if w.last is None or w.free_at > now]

    def signals(self, now: float) -> RoleSignals:
        ready = [w for w in self.workers if w.last is None and w.ready <= now]
        queued, requests = 0.0, 0
        for worker in self.workers:
            worker.queue = [one for one in worker.queue if one[1] > now]
            if worker.last is None:
                requests += len(worker.queue)
                queued += sum(
                    tokens * min(1.0, (end - now) / (end - start)) for start, end, tokens in worker.queue if end > start
                )
        num_busy = sum(any(start <= now for start, _, _ in worker.queue) for worker in ready)
        return RoleSignals(num_ready=len(ready), num_requests=requests, queued_tokens=int(queued), num_busy=num_busy)

    def end(self, now: float) -> float:
        return self.paid_s + sum(now - w.since for w in self.workers if w.last is None)


@dataclass(slots=True, eq=False)
class DecodeWorker:
    since: float
    ready: float
    clock: float = 0.0  # when `tokens` was right
    tokens: float = 0.0  # tokens that each request would have made since the worker's start
    batch: list[tuple[float, float, int, int]] = field(default_factory=list)  # heap: end in tokens, joined, job, KV
    num_kv_tokens: int = 0
    last: float | None = None


class Decode:
    """Requests go to the ready worker with the fewest; all of a worker's requests make one token in each step."""

    def __init__(self, hardware: Hardware, num_workers: int, done: Callable[[int, float, float], None]) -> None:
        self._hardware = hardware
        self._done = done
        self.workers = [DecodeWorker(0.0, 0.0) for _ in range(num_workers)]
        self.paid_s = 0.0

    def _advance(self, worker: DecodeWorker, now: float) -> None:
        while worker.clock < now:
            step = self._hardware.step_s + self._hardware.step_per_request_s * len(worker.batch)
            if not worker.batch:
                worker.clock = now
                return
            until = worker.clock + (worker.batch[0][0] - worker.tokens) * step
            if until > now:
                worker.tokens += (now - worker.clock) / step
                worker.clock = now
                return
            worker.clock, worker.tokens = until, worker.batch[0][0]
            _, joined, index, num_kv_tokens = heapq.heappop(worker.batch)
            worker.num_kv_tokens -= num_kv_tokens
            self._done(index, joined, until)
            if worker.last is not None and not worker.batch:
                self.paid_s += until - worker.since

    def advance(self, now: float) -> None:
        for worker in self.workers:
            self._advance(worker, now)
        self.workers = [w for w in self.workers if w.last is None or w.batch]

    def add(self, now: float, index: int, job: Job) -> None:
        candidates = [w for w in self.workers if w.last is None]
        worker = min(candidates, key=lambda w: (w.ready > now, len(w.batch)))
        self._advance(worker, max(now, worker.ready))
        num_kv_tokens = job.num_prompt_tokens + job.num_output_tokens
        worker.num_kv_tokens += num_kv_tokens
        heapq.heappush(worker.batch, (worker.tokens + job.num_output_tokens, now, index, num_kv_tokens))

    def scale(self, now: float, desired: int, *, startup_s: float) -> None:
        running = [w for w in self.workers if w.last is None]
        for _ in range(desired - len(running)):
            self.workers.append(DecodeWorker(now, now + startup_s, clock=now))
        emptiest_first = sorted(running, key=lambda w: (w.ready <= now, len(w.batch)))
        for worker in emptiest_first[: max(len(running) - max(desired, 1), 0)]:
            worker.last = now
            if not worker.batch:
                self.paid_s += now - worker.since

    def signals(self, now: float) -> RoleSignals:
        running = [w for w in self.workers if w.last is None]
        return RoleSignals(
            num_ready=sum(w.ready <= now for w in running),
            num_requests=sum(len(w.batch) for w in running),
            kv_used=sum(min(1.0, w.num_kv_tokens / self._hardware.kv_tokens) for w in running),
        )

    def end(self, now: float) -> float:
        self.advance(now)
        return self.paid_s + sum(now - w.since for w in self.workers)


@dataclass(slots=True, frozen=True)
class Outcome:
    ttft_ok: float  # share of requests
    tpot_ok: float
    slo_ok: float  # both
    prefill_hours: float
    decode_hours: float
    num_changes: int  # decisions that changed replicas

    @property
    def hours(self) -> float:
        return self.prefill_hours + self.decode_hours


Plan = Callable[[float, FleetSignals], tuple[int, int]]


def simulate(
    jobs: Sequence[Job], hardware: Hardware, slo: Slo, plan: Plan, start: tuple[int, int], *, startup_s: float
) -> Outcome:
    """Runs `plan` once a second."""
    num_jobs = len(jobs)
    ttft = [math.inf] * num_jobs
    tpot = [math.inf] * num_jobs

    def done(index: int, joined: float, at: float) -> None:
        tpot[index] = (at - joined) / max(jobs[index].num_output_tokens, 1)

    prefill, decode = Prefill(hardware, start[0]), Decode(hardware, start[1], done)
    handoffs: list[tuple[float, int]] = []
    arrivals = ArrivalRate(window_s=ARRIVAL_WINDOW_S)
    end = math.ceil(jobs[-1].arrival) + 1
    upcoming, num_tokens, changes, current = 0, 0, 0, start
    for second in range(end):
        now = float(second)
        while upcoming < num_jobs and jobs[upcoming].arrival < now:
            job = jobs[upcoming]
            first_token = prefill.add(job.arrival, job)
            ttft[upcoming] = first_token - job.arrival
            heapq.heappush(handoffs, (first_token, upcoming))
            num_tokens += job.num_prompt_tokens
            upcoming += 1
        while handoffs and handoffs[0][0] < now:
            at, index = heapq.heappop(handoffs)
            decode.advance(at)
            decode.add(at, index, jobs[index])
        decode.advance(now)
        arrivals.add(now, num_tokens)
        signals = FleetSignals(
            prefill=prefill.signals(now),
            decode=decode.signals(now),
            arrival_tokens_per_s=arrivals.rate(),
            arrived_tokens=float(num_tokens),
        )
        wanted = plan(now, signals)
        if wanted != current:
            changes, current = changes + 1, wanted
            prefill.scale(now, wanted[0], startup_s=startup_s)
            decode.scale(now, wanted[1], startup_s=startup_s)
    hours = prefill.end(end) / 3600, decode.end(end) / 3600
    while handoffs:  # what is under way ends, for its TPOT; nobody pays for it on either side
        at, index = heapq.heappop(handoffs)
        decode.advance(at)
        decode.add(at, index, jobs[index])
    decode.advance(end + 1e9)
    ttft_ok = [value <= slo.ttft_s for value in ttft]
    tpot_ok = [value <= slo.tpot_s for value in tpot]
    both = sum(a and b for a, b in zip(ttft_ok, tpot_ok, strict=True))
    return Outcome(sum(ttft_ok) / num_jobs, sum(tpot_ok) / num_jobs, both / num_jobs, *hours, changes)


def run_planner(
    jobs: Sequence[Job],
    hardware: Hardware,
    slo: Slo,
    options: PlannerOptions,
    targets: Targets,
    history: list[tuple[int, int]] | None = None,
    *,
    learns: bool = False,
) -> Outcome:
    """`history` is given what was desired in each second. With `learns` the planner may learn a prefill worker's rate,
    if targets have none."""
    planner = Planner(options, TargetRules(targets))

    def plan(now: float, signals: FleetSignals) -> tuple[int, int]:
        decisions = planner.step(now, signals if learns else replace(signals, arrived_tokens=None))
        wanted = decisions[WorkerRole.PREFILL].desired, decisions[WorkerRole.DECODE].desired
        if history is not None:
            history.append(wanted)
        return wanted

    return simulate(jobs, hardware, slo, plan, _first_guess(jobs, hardware, slo), startup_s=hardware.startup_s)


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


def _first_guess(jobs: Sequence[Job], hardware: Hardware, slo: Slo) -> tuple[int, int]:
    """What both start from: the first two minutes' load, as an operator would have set it."""
    loads = offered(jobs, hardware, slo, 120.0)
    return math.ceil(loads[0][0] * 1.2), math.ceil(loads[0][1] * 1.2)


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
        def plan(now: float, _signals: FleetSignals) -> tuple[int, int]:
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


def read_trace(path: Path, *, scale: float) -> list[Job]:
    jobs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        jobs.append(
            Job(one["timestamp"] / 1000, max(1, int(one["input_length"] * scale)), max(1, one["output_length"]))
        )
    return sorted(jobs, key=lambda job: job.arrival)


def synthetic_day(seed: int = 1, seconds: float = 3600.0, peak_rate: float = 8.0) -> list[Job]:
    """A day's curve in an hour: a quiet night, two peaks, and a burst of three minutes at double rate."""
    draw = random.Random(seed)
    jobs: list[Job] = []
    now = 0.0
    while now < seconds:
        now += draw.expovariate(peak_rate)
        phase = now / seconds
        level = 0.15 + 0.5 * math.sin(math.pi * phase) ** 2 + 0.25 * math.sin(2 * math.pi * phase) ** 2
        if 0.4 < phase < 0.45:
            level *= 1.6
        if draw.random() < level:
            prompt = min(32_000, int(draw.lognormvariate(8.0, 1.0)))
            jobs.append(Job(now, max(16, prompt), max(8, int(draw.expovariate(1 / 350)))))
    return jobs


def thinned(jobs: Sequence[Job], seed: int = 1) -> list[Job]:
    """The trace under a day's curve: requests are kept with a probability that rises and falls."""
    draw = random.Random(seed)
    end = jobs[-1].arrival
    return [job for job in jobs if draw.random() < 0.2 + 0.8 * math.sin(math.pi * job.arrival / end) ** 2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="of prompt lengths")
    parser.add_argument("--prefill-rate", type=float, default=Hardware().prefill_rate)
    parser.add_argument("--startup", type=float, default=Hardware().startup_s)
    parser.add_argument("--window", type=float, default=60.0, help="seconds for which the oracle keeps its numbers")
    parser.add_argument("--ttft", type=float, default=Slo().ttft_s)
    parser.add_argument("--tpot", type=float, default=Slo().tpot_s)
    parser.add_argument("--utilization", type=float, default=0.8, help="share of a worker's rate that it is given")
    parser.add_argument(
        "--rate", choices=("given", "learned", "unknown"), default="given", help="a prefill worker's, to the planner"
    )
    parser.add_argument("--no-oracle", action="store_true")
    options = parser.parse_args(arguments)

    hardware = Hardware(prefill_rate=options.prefill_rate, startup_s=options.startup)
    slo = Slo(ttft_s=options.ttft, tpot_s=options.tpot)
    traffic: dict[str, list[Job]] = {"synthetic day": synthetic_day()} if not options.traces else {}
    for path in options.traces:
        jobs = read_trace(path, scale=options.scale)
        traffic[path.stem] = jobs
        traffic[f"{path.stem}, day curve"] = thinned(jobs)
    targets = Targets(
        # A queue that takes half of the TTFT to compute.
        queued_tokens=hardware.prefill_rate * slo.ttft_s / 2,
        prefill_rate=hardware.prefill_rate * options.utilization if options.rate == "given" else None,
        requests=best_batch(hardware, slo) * options.utilization,
    )
    planner = PlannerOptions(prefill=Bounds(1, 64), decode=Bounds(1, 64), scale_down_delay_s=120.0)
    rows = []
    for name, jobs in traffic.items():
        history: list[tuple[int, int]] = []
        planned = run_planner(jobs, hardware, slo, planner, targets, history, learns=options.rate == "learned")
        row: dict[str, object] = {"traffic": name, "num_requests": len(jobs), "planner": asdict(planned)}
        if not options.no_oracle:
            oracle = run_oracle(jobs, hardware, slo, planned, history, options.window)
            row |= {"oracle": asdict(oracle), "hours_over_oracle": planned.hours / oracle.hours - 1}
        rows.append(row)
        if not options.json:
            _show(row)
    if options.json:
        json.dump(rows, sys.stdout, indent=2)
        print()
    return 0


def _show(row: dict[str, object]) -> None:
    print(f"{row['traffic']}: {row['num_requests']} requests")
    for side in ("planner", "oracle"):
        one = row.get(side)
        if isinstance(one, dict):
            print(
                f"  {side:8} SLO {one['slo_ok']:7.2%} (TTFT {one['ttft_ok']:7.2%}, TPOT {one['tpot_ok']:7.2%})"
                f"   worker-hours {one['prefill_hours']:6.2f} prefill + {one['decode_hours']:6.2f} decode"
                f"   {one['num_changes']} changes"
            )
    if "hours_over_oracle" in row:
        print(f"  worker-hours over the oracle's: {row['hours_over_oracle']:+.1%}")


if __name__ == "__main__":
    sys.exit(main())
