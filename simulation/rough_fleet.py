"""A fleet as queues and batches, without tokens, that a plan scales once a second: what a planner and its oracle are
compared on. The oracle plays a trace thousands of times, for which `simulation.fleet` is too slow.

Prefill workers compute their queues in order, decode workers share each step among their requests (time per token grows
with the batch), a new worker serves some seconds after it was asked for, and one that is to go finishes what it has.
Every second from asking for a worker to its end is paid.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from router.autoscaler.arrivals import ArrivalRate
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

    def prompt_s(self, num_tokens: float) -> float:
        return num_tokens / self.prefill_rate

    def decode_s(self, num_requests: float, _context: float) -> float:
        return self.step_s + self.step_per_request_s * num_requests


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


Plan = Callable[[float, Callable[[], FleetSignals]], tuple[int, int]]
"""Given the second, and a function that reads the fleet in it: an oracle does not look."""


def simulate(
    jobs: Sequence[Job], hardware: Hardware, slo: Slo, plan: Plan, start: tuple[int, int], *, startup_s: float
) -> Outcome:
    """Runs `plan` once a second."""
    num_jobs = len(jobs)
    ttft = [math.inf] * num_jobs
    tpot = [math.inf] * num_jobs

    answered_tokens = 0

    def done(index: int, joined: float, at: float) -> None:
        nonlocal answered_tokens
        answered_tokens += jobs[index].num_output_tokens
        tpot[index] = (at - joined) / max(jobs[index].num_output_tokens, 1)

    prefill, decode = Prefill(hardware, start[0]), Decode(hardware, start[1], done)
    handoffs: list[tuple[float, int]] = []
    arrivals = ArrivalRate(window_s=ARRIVAL_WINDOW_S)
    end = math.ceil(jobs[-1].arrival) + 1
    upcoming, num_tokens, changes, current = 0, 0, 0, start

    def signals(now: float) -> FleetSignals:
        return FleetSignals(
            prefill=replace(prefill.signals(now), times=(hardware,)),
            decode=replace(decode.signals(now), times=(hardware,)),
            arrival_tokens_per_s=arrivals.rate(),
            arrived_tokens=float(num_tokens),
            arrived_requests=float(upcoming),
            answered_tokens=float(answered_tokens),
        )

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
        wanted = plan(now, partial(signals, now))
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
