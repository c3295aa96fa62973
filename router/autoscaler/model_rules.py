"""How many workers hold latency targets with a stated probability, by the workers' own models of time.

    arrivals, lengths ── forecast ──> load when a new worker serves ──┐
    workers' models of time ────────> what a worker takes ────────────┼── late shares ──> the least N and M
    queue, requests ────────────────> what is already there ──────────┘

Two loops: the forecast alone is a floor, and what is queued and running now may ask for more. A number is good if few
enough requests are late while a worker starts: after that the next decision can help.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from common.errors import ConfigError
from router.autoscaler.forecast import DAY_S, MEMORY_S, Expected, LengthForecast, RequestForecast, expected_tokens
from router.autoscaler.late_shares import DecodeBatch, PrefillQueue
from router.autoscaler.rules import Needs, PrefillPace, Rules, RunningRatio
from router.autoscaler.signals import FleetSignals, Need, WorkerTime

PLENTY = 0.5  # of the share that may be late: workers beyond those that keep it to that need not stay
OTHER_SPLITS = 3  # decode workers more than the fewest, that might save more prefill workers
WARM_UP_S = 60.0
ANSWER_MEMORY_S = 300.0
MOST_WORKERS = 1 << 16
MOST_REQUESTS = 4096  # of one worker


@dataclass(slots=True, frozen=True, kw_only=True)
class LatencyGoal:
    ttft_s: float
    tpot_s: float
    share: float = 0.9  # of requests that keep both
    startup_s: float = 30.0  # from asking for a worker until it serves
    kv_usage: float = 0.7  # share of a decode worker's KV blocks that may be in use


def latency_goal(
    planner: str, ttft_ms: float | None, tpot_ms: float | None, *, share: float, startup_s: float, kv_usage: float
) -> LatencyGoal | None:
    """From settings; None if `planner` is `signals`. Raises `ConfigError` for a target that is missing, or that would
    change nothing."""
    if planner == "signals":
        for name, value in (("target_ttft_ms", ttft_ms), ("target_tpot_ms", tpot_ms)):
            if value is not None:
                raise ConfigError(name, "means nothing if --planner is signals")
        return None
    if ttft_ms is None:
        raise ConfigError("target_ttft_ms", f"is needed by --planner {planner}")
    if tpot_ms is None:
        raise ConfigError("target_tpot_ms", f"is needed by --planner {planner}")
    return LatencyGoal(
        ttft_s=ttft_ms / 1000, tpot_s=tpot_ms / 1000, share=share, startup_s=startup_s, kv_usage=kv_usage
    )


class ModelRules:
    """Rules that plan by targets of latency. Until workers say how long steps take, and something has arrived,
    `fallback` decides; it is asked all along, so that it has learned what it needs.

    What it gives are workers' worths of each role, whole because a worker has one role. Workers that share their time
    between roles would take the same late shares with parts of workers.
    """

    def __init__(self, goal: LatencyGoal, fallback: Rules, *, day_s: float = DAY_S) -> None:
        self._goal = goal
        self._fallback = fallback
        self._requests = RequestForecast(day_s)
        self._prompts = LengthForecast()
        self._answers = _AnswerLength()
        self._pace = PrefillPace(MEMORY_S)
        self._kv_per_request = RunningRatio(MEMORY_S)
        self._prefill_times: tuple[WorkerTime, ...] = ()
        self._decode_times: tuple[WorkerTime, ...] = ()
        self._running: tuple[float, float] | None = None  # when, and the mean of decode's requests
        self._last: tuple[float, Needs] | None = None
        self._numbers = 1, 1  # the last ones: the next search begins there
        self._first: float | None = None

    def needs(self, now: float, signals: FleetSignals) -> Needs:
        if self._first is None:
            self._first = now
        otherwise = self._fallback.needs(now, signals)
        if signals.arrived_requests is None or signals.arrived_tokens is None or signals.answered_tokens is None:
            if self._last is None or now - self._last[0] > MEMORY_S:
                return otherwise
            prefill, decode = self._last[1].prefill, self._last[1].decode
            return Needs(_kept(prefill), _kept(decode))
        pace = self._observe(now, signals)
        plan = self._plan(signals, pace)
        if plan is None:
            return _at_least(signals, otherwise) if now - self._first < WARM_UP_S else otherwise
        self._last = now, plan
        return plan

    def _observe(self, now: float, signals: FleetSignals) -> float | None:
        """Returns a prefill worker's rate as the flow says it, if that is known."""
        requests, prompts, answers = signals.arrived_requests, signals.arrived_tokens, signals.answered_tokens
        if requests is not None and prompts is not None and answers is not None:
            self._requests.add(now, requests)
            self._prompts.add(now, requests, prompts)
            self._answers.add(now, requests, answers)
        prefill, decode = signals.prefill, signals.decode
        self._prefill_times = prefill.times or self._prefill_times
        self._decode_times = decode.times or self._decode_times
        if decode.num_requests:
            self._kv_per_request.add(now, decode.kv_used, decode.num_requests)
        if not decode.num_silent:
            # Requests come and go while a worker starts: only a number that stays is worth one.
            at, mean = self._running or (now, float(decode.num_requests))
            share = min(1.0, (now - at) / self._goal.startup_s) if self._goal.startup_s else 1.0
            self._running = now, mean + share * (decode.num_requests - mean)
        return self._pace.learn(now, signals)

    def _plan(self, signals: FleetSignals, pace: float | None) -> Needs | None:
        """None if not enough is known."""
        goal, times = self._goal, self._prefill_times
        requests = self._requests.ahead(goal.startup_s)
        prompts, answer_tokens = self._prompts.ahead(goal.startup_s), self._answers.mean()
        if requests is None or prompts is None or answer_tokens is None or not times or not self._decode_times:
            return None
        tokens = expected_tokens(requests, self._prompts, goal.startup_s)
        if tokens is None:
            return None
        rate = pace or prompts[0] / (sum(one.prompt_s(prompts[0]) for one in times) / len(times))
        queue = PrefillQueue(tokens, self._prompts.squared_variation, prompts[0], rate, goal.ttft_s)
        batch = self._batch(requests, prompts[0], answer_tokens)

        running = 0.0 if self._running is None else self._running[1]
        by_load = max(running / batch.most, signals.decode.kv_used / goal.kv_usage)
        late_prefill = cache(partial(self._late, queue, signals))
        least = self._least_workers(late_prefill, batch, by_load, 1 - goal.share)
        plenty = self._least_workers(late_prefill, batch, by_load, PLENTY * (1 - goal.share))
        self._numbers = least.prefill, least.floor
        return Needs(
            Need(least.prefill, self._prefill_reason(queue, signals, least.prefill), exact=True, plenty=plenty.prefill),
            Need(
                least.decode,
                _decode_reason(batch, by_load, least.floor, least.decode),
                exact=True,
                plenty=plenty.decode,
            ),
        )

    def _least_workers(
        self, late_prefill: Callable[[int], float], batch: DecodeBatch, by_load: float, late: float
    ) -> _Workers:
        """Of both roles together, with which at most a share of `late` misses one of its targets."""
        floor = _least(batch.late, late, self._numbers[1])
        fewest = max(floor, math.ceil(by_load - 1e-9))
        found: list[_Workers] = []
        for decode in range(fewest, fewest + OTHER_SPLITS + 1):
            # Both targets are to be kept: prefill may be late for what decode leaves.
            left = 1 - (1 - late) / (1 - min(batch.late(decode), late))
            found.append(_Workers(_least(late_prefill, left, self._numbers[0]), decode, floor))
        return min(found, key=lambda one: one.prefill + one.decode)

    def _late(self, queue: PrefillQueue, signals: FleetSignals, num: int) -> float:
        """Of prompts, with what is queued now: before a worker more than now serves, the queue has grown or shrunk."""
        queued, ready = float(signals.prefill.queued_tokens), max(signals.prefill.num_ready, 1)
        if num > ready:
            queued = max(0.0, queued + (queue.tokens.rate - ready * queue.rate) * self._goal.startup_s)
        return queue.late(num, queued_tokens=queued, seconds=self._goal.startup_s)

    def _batch(self, requests: Expected, prompt_tokens: float, answer_tokens: float) -> DecodeBatch:
        times, context = self._decode_times, prompt_tokens + answer_tokens / 2

        def step_s(num: int) -> float:
            return sum(one.decode_s(num, context) for one in times) / len(times)

        low, high = 1, MOST_REQUESTS + 1  # `low` is in time, or the least there is
        while high - low > 1:
            middle = (low + high) // 2
            if step_s(middle) <= self._goal.tpot_s:
                low = middle
            else:
                high = middle
        at_most = step_s(low)
        slope = (at_most - step_s(1)) / (low - 1) if low > 1 else 0.0
        # Where one more request would be late, a part of it is not.
        most = low + (max(0.0, self._goal.tpot_s - at_most) / slope if slope and low < MOST_REQUESTS else 0.0)
        kv = self._kv_per_request.value()
        if kv:
            most = max(1.0, min(most, self._goal.kv_usage / kv))
        return DecodeBatch(requests, answer_tokens, max(0.0, at_most - slope * low), slope, most)

    def _prefill_reason(self, queue: PrefillQueue, signals: FleetSignals, num: int) -> str:
        late, waiting = self._late(queue, signals, num), signals.prefill.queued_tokens
        queued = f" and {waiting} queued" if waiting else ""
        return (
            f"{queue.tokens.rate:.0f} prompt tokens/s in {self._goal.startup_s:g} s{queued}, {queue.rate:.0f} per "
            f"worker: {late:.1%} later than {queue.ttft_s:g} s"
        )


@dataclass(slots=True, frozen=True)
class _Workers:
    prefill: int
    decode: int
    floor: int  # decode workers by the forecast alone


class _AnswerLength:
    """Mean tokens of an answer, from what is answered and what arrives: alike over some minutes."""

    def __init__(self) -> None:
        self._ratio = RunningRatio(ANSWER_MEMORY_S)
        self._last: tuple[float, float, float] | None = None  # now, requests, tokens

    def add(self, now: float, requests: float, tokens: float) -> None:
        before, self._last = self._last, (now, requests, tokens)
        if before is not None and now > before[0] and requests >= before[1] and tokens >= before[2]:
            elapsed = now - before[0]
            self._ratio.add(now, (tokens - before[2]) / elapsed, (requests - before[1]) / elapsed)

    def mean(self) -> float | None:
        mean = self._ratio.value()
        return None if mean is None else max(mean, 1.0)


def _decode_reason(batch: DecodeBatch, by_load: float, floor: int, num: int) -> str:
    if by_load > floor:
        return f"requests or KV of {by_load:.2f} workers, {batch.most:.0f} requests per worker in time"
    return (
        f"{batch.requests.rate:.2f} requests/s of {batch.mean_tokens:.0f} tokens, {batch.most:.0f} requests per worker "
        f"in time: {batch.late(num):.1%} too slow"
    )


def _at_least(signals: FleetSignals, needs: Needs) -> Needs:
    """What is there stays while nothing is known yet: an autoscaler that was restarted takes no worker away."""

    def kept(need: Need, num_workers: int) -> Need:
        if need.workers >= num_workers:
            return need
        return Need(num_workers, "too little has arrived yet to plan by, as many as there are", exact=True)

    return Needs(kept(needs.prefill, signals.prefill.num_workers), kept(needs.decode, signals.decode.num_workers))


def _kept(need: Need) -> Need:
    return Need(need.workers, f"routers are silent, as planned last: {need.reason}", exact=True)


def _least(late_with: Callable[[int], float], late: float, guess: int) -> int:
    """The fewest workers with which at most `late` are late. More workers never make more requests late, so the search
    begins at `guess` and doubles its strides."""
    low, high, stride = 0, guess, 1
    while late_with(high) > late:
        if high >= MOST_WORKERS:
            return high
        low, high, stride = high, high + stride, 2 * stride
    while high - stride > low and late_with(high - stride) <= late:
        high, stride = high - stride, 2 * stride
    low = max(low, high - stride)
    while high - low > 1:
        middle = (low + high) // 2
        if late_with(middle) > late:
            low = middle
        else:
            high = middle
    return high
