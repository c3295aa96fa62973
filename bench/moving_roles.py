"""A day whose mix changes, on fleets whose roles stay and on one whose roles move: long prompts in the morning, long
answers in the evening.

    python -m bench.moving_roles [--workers 4] [--times 4xh100-70b] [--seconds 300] [--json]

All fleets are simulated (`simulation`) and have as many workers; all times are virtual, so figures are the same on
every machine. Each half of the day has as much work for its role as `LOAD` of all workers but one can do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from common.config import SimulateSettings
from common.goodput import parse_goodput
from common.traffic import arrivals, sizes
from common.traffic.made import independent
from common.traffic.requests import TrafficRequest
from engine.simulated.data_sheet import simulated_time
from router.autoscaler.fleet_load import ModelTime
from simulation.fleet import Fleet
from simulation.scenario import fleet_options, scenarios

LOAD = 0.8
BATCH = 32  # requests of a decode worker at once, whose steps are in time
SIGMA = 0.3  # of the lengths' logarithms


@dataclass(slots=True, frozen=True, kw_only=True)
class Half:
    prompt_tokens: int  # the median
    output_tokens: int


MORNING, EVENING = Half(prompt_tokens=4000, output_tokens=40), Half(prompt_tokens=200, output_tokens=400)


@dataclass(slots=True, frozen=True, kw_only=True)
class Row:
    fleet: str
    morning: float  # share of good answers
    evening: float
    day: float
    num_shifts: int


def day(num_workers: int, times: str, seconds: float, seed: int = 1) -> list[TrafficRequest]:
    """`seconds`: of each half."""
    time = ModelTime(simulated_time(times).time)
    prompts_per_s = 1 / time.prompt_s(MORNING.prompt_tokens)
    answers_per_s = BATCH / time.decode_s(BATCH, EVENING.prompt_tokens + EVENING.output_tokens / 2)
    rates = prompts_per_s, answers_per_s / EVENING.output_tokens
    found: list[TrafficRequest] = []
    for number, (half, rate) in enumerate(zip((MORNING, EVENING), rates, strict=True)):
        name = f"{seed}/{number}"
        made = independent(
            arrivals.poisson(LOAD * (num_workers - 1) * rate, seed + number),
            sizes.lognormal(half.prompt_tokens, SIGMA, 1, 4 * half.prompt_tokens, f"prompts/{name}"),
            sizes.lognormal(half.output_tokens, SIGMA, 1, 4 * half.output_tokens, f"outputs/{name}"),
        )
        begin, first_run = number * seconds, number << 20  # no prompt of the evening was there in the morning
        found += [
            TrafficRequest(
                at=begin + one.at,
                runs=tuple((first_run + run, length) for run, length in one.runs),
                num_output_tokens=one.num_output_tokens,
            )
            for one in itertools.takewhile(lambda one: one.at < seconds, made)
        ]
    return found


def play(requests: Sequence[TrafficRequest], seconds: float, name: str = "", **given: object) -> Row:
    """One fleet. `given`: settings of `baton simulate`."""
    settings = SimulateSettings.model_validate({"leap": True, **given})
    (scenario,) = scenarios(settings)
    fleet = Fleet(fleet_options(settings, scenario))
    outcome = fleet.run(requests)
    if wrong := fleet.check_integrity():
        raise AssertionError(wrong[0])
    goodput = parse_goodput(settings.goodput, "goodput")
    good = [one.is_good(goodput) for one in outcome.requests]
    early = sum(one.at < seconds for one in outcome.requests)
    return Row(
        fleet=name or scenario.fleet,
        morning=sum(good[:early]) / early,
        evening=sum(good[early:]) / (len(good) - early),
        day=sum(good) / len(good),
        num_shifts=len(outcome.shifts),
    )


def rows(num_workers: int, times: str, seconds: float, ttft_ms: float, tpot_ms: float) -> Iterator[Row]:
    requests = day(num_workers, times, seconds)
    given = {"times": times, "goodput": f"ttft:{ttft_ms:g},tpot:{tpot_ms:g}"}
    for prefill in range(1, num_workers):
        yield play(requests, seconds, prefill=prefill, decode=num_workers - prefill, **given)
    yield play(requests, seconds, "all with both roles", prefill=0, decode=0, both=num_workers, **given)
    half = num_workers // 2
    moving = {**given, "move_roles": True, "prefill": half, "decode": num_workers - half}
    yield play(requests, seconds, "moving, by signals", **moving)
    by_model = {"planner": "model", "target_ttft_ms": ttft_ms, "target_tpot_ms": tpot_ms}
    yield play(requests, seconds, "moving, by the model", **moving, **by_model)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--times", default="4xh100-70b")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each half of the day")
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=40.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.workers < 2:
        parser.error("--workers: two at least")
    if not args.json:
        print("| fleet | morning | evening | day | shifts |\n| --- | --- | --- | --- | --- |")
    found = []
    for row in rows(args.workers, args.times, args.seconds, args.ttft_ms, args.tpot_ms):
        found.append(asdict(row))
        if not args.json:
            line = f"| {row.fleet} | {row.morning:.1%} | {row.evening:.1%} | {row.day:.1%} | {row.num_shifts} |"
            print(line, flush=True)
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
