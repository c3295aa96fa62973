"""The figures of a run. Names are those of the JSON of `vllm bench serve` where they mean the same.

Differences: times count from when a request was due, not from when it was sent; and only what was due after the
warm-up counts.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from bench.serving.numbers import interval, percentile
from bench.serving.outcome import Ending, Outcome
from bench.serving.run import Run
from common.goodput import Goodput, is_good

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Figures = dict[str, Json]

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
LATENCIES = ("ttft", "tpot", "itl", "e2el")

MOST_REASONS = 10  # why requests did not complete, the most frequent ones
MAX_LAG_S = 0.010
MAX_LAG_SHARE = 0.10  # of the median TTFT, if that allows more
MAX_CLIENT_CPU = 0.9  # of a core


def figures(run: Run, targets: Goodput, *, warm_up_s: float = 0.0, max_lag_s: float | None = None) -> Figures:
    """What is due before `warm_up_s` is counted apart. `max_lag_s`: see `invalid_reasons`."""
    warm_up = [one for one in run.outcomes if one.due_s < warm_up_s]
    counted = [one for one in run.outcomes if one.due_s >= warm_up_s]
    completed = [one for one in counted if one.ending is Ending.COMPLETED]
    endings = Counter(one.ending for one in counted)
    duration = max((one.ended_s for one in counted), default=warm_up_s) - warm_up_s
    per_s = 1 / duration if duration > 0 else 0.0
    num_input = sum(one.prompt_tokens for one in completed)
    num_output = sum(one.output_tokens for one in completed)
    made: Figures = {
        "duration": duration,
        "completed": len(completed),
        "failed": endings[Ending.FAILED],
        "refused": endings[Ending.REFUSED],
        "cancelled": endings[Ending.CANCELLED],
        "not_sent": run.num_not_sent,
        "warmup_completed": sum(one.ending is Ending.COMPLETED for one in warm_up),
        "warmup_not_completed": sum(one.ending is not Ending.COMPLETED for one in warm_up),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(one.cached_tokens for one in completed),
        "request_throughput": len(completed) * per_s,
        "output_throughput": num_output * per_s,
        "total_token_throughput": (num_input + num_output) * per_s,
    }
    if targets:
        good = [one for one in completed if is_good(targets, ttft_s=one.ttft_s, tpot_s=one.tpot_s, e2el_s=one.e2el_s)]
        num_judged = len(counted) - endings[Ending.CANCELLED]
        made["request_goodput"] = len(good) * per_s
        made["token_goodput"] = sum(one.output_tokens for one in good) * per_s
        made["good_request_fraction"] = len(good) / num_judged if num_judged else 0.0
    made["error_counts"] = dict(Counter(one.reason for one in counted if one.reason).most_common(MOST_REASONS))
    made["max_concurrent_requests"] = _most_at_once(counted)
    made["max_output_tokens_per_s"] = _most_tokens_in_a_second(completed)
    values = {
        "ttft": [one.ttft_s for one in completed],
        "tpot": [one.tpot_s for one in completed if one.tpot_s is not None],
        "itl": [gap for one in completed for gap in one.itls_s],
        "e2el": [one.e2el_s for one in completed],
    }
    for name in LATENCIES:
        made |= _spread(name, values[name])
    made |= _spread("client_queue_time", [one.queue_s for one in counted])
    made |= _spread("send_lag", [one.send_lag_s for one in counted])
    made |= _spread("client_loop_lag", run.loop_lags_s)
    made["client_cpu_utilization"] = run.client_cpu
    made["delivered_rate"] = _delivered_rate(counted)
    reasons = invalid_reasons(made, max_lag_s)
    made["valid"] = not reasons
    made["invalid_reasons"] = [*reasons]
    return made


def invalid_reasons(made: Figures, max_lag_s: float | None = None) -> list[str]:
    """Why the client, and not the endpoint, decided what was measured; nothing if it did not.

    `max_lag_s` is how late the client may be in the 99th percentile: 10 ms, or a tenth of the median TTFT if that is
    more. A client that is late sends another load than it was asked for, and notices tokens late.
    """
    limit_ms = 1000 * (MAX_LAG_S if max_lag_s is None else max_lag_s)
    if max_lag_s is None:
        limit_ms = max(limit_ms, MAX_LAG_SHARE * number(made, "median_ttft_ms"))
    reasons = []
    for name, what in (
        ("send_lag", "requests were sent late"),
        ("client_loop_lag", "the client's event loop was late"),
    ):
        lag_ms = number(made, f"p99_{name}_ms")
        if lag_ms > limit_ms:
            reasons.append(f"{what}: {lag_ms:.1f} ms in the 99th percentile, limit {limit_ms:.1f} ms")
    if (cpu := number(made, "client_cpu_utilization")) > MAX_CLIENT_CPU:
        reasons.append(f"the client took {cpu:.0%} of a core")
    return reasons


def number(made: Mapping[str, Json], name: str) -> float:
    """A figure that is a number; 0 if it is not there."""
    value = made.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _spread(name: str, values_s: Sequence[float]) -> Figures:
    if not values_s:
        return {}
    ordered = sorted(values_s)
    made: Figures = {
        f"mean_{name}_ms": 1000 * statistics.fmean(ordered),
        f"median_{name}_ms": 1000 * percentile(ordered, 50),
        f"std_{name}_ms": 1000 * statistics.pstdev(ordered),
    }
    for percent in PERCENTILES:
        made[f"p{percent:g}_{name}_ms"] = 1000 * percentile(ordered, percent)
    made[f"max_{name}_ms"] = 1000 * ordered[-1]
    return made


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(one.sent_s, 1) for one in outcomes] + [(one.ended_s, -1) for one in outcomes])
    num = most = 0
    for _, change in changes:
        num += change
        most = max(most, num)
    return most


def _most_tokens_in_a_second(outcomes: Sequence[Outcome]) -> float:
    """Tokens of an event are counted at its time: each event of an answer stands for as many."""
    seconds: defaultdict[int, float] = defaultdict(float)
    for one in outcomes:
        each = one.output_tokens / len(one.token_times_s)
        for at in one.token_times_s:
            seconds[int(at)] += each
    return max(seconds.values(), default=0.0)


def _delivered_rate(outcomes: Sequence[Outcome]) -> float:
    """Requests that were sent per second, while requests were sent."""
    sent = sorted(one.sent_s for one in outcomes)
    return (len(sent) - 1) / (sent[-1] - sent[0]) if len(sent) > 1 and sent[-1] > sent[0] else 0.0


def over_repeats(runs: Sequence[Figures]) -> Figures:
    """The mean of each figure over runs of the same load, and how sure it is: `confidence_95` has the bounds of each
    mean, `repeats` the runs. `error_counts` are of all runs together. One run is its own figures."""
    if len(runs) == 1:
        return runs[0]
    made: Figures = {}
    bounds: dict[str, Json] = {}
    for name in runs[0]:
        values = [run.get(name) for run in runs]
        if name in ("valid", "invalid_reasons"):
            continue
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) == len(runs):
            found = interval(numbers)
            made[name], bounds[name] = found.mean, [found.low, found.high]
    errors: Counter[str] = Counter()
    for run in runs:
        counts = run["error_counts"]
        assert isinstance(counts, dict)
        errors.update({reason: int(number(counts, reason)) for reason in counts})
    made["error_counts"] = dict(errors)
    made["valid"] = all(run["valid"] for run in runs)
    reasons: list[Json] = []
    for index, run in enumerate(runs, 1):
        given = run["invalid_reasons"]
        assert isinstance(given, list)
        reasons += [f"repeat {index}: {reason}" for reason in given]
    made["invalid_reasons"] = reasons
    made["confidence_95"] = bounds
    made["repeats"] = [*runs]
    return made
