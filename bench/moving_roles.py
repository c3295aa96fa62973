"""A day whose mix changes, on fleets whose roles stay and on one whose roles move: long prompts in the morning, long
answers in the evening.

    python -m bench.moving_roles [--workers 3] [--times xeon-135m] [--seconds 240] [--json]

All fleets are simulated (`simulation`) and have as many workers; all times are virtual, so figures are the same on
every machine. In the first third of the day there are only prompts, as many as `LOAD` of all workers but one can
compute; in the last third only answers, likewise; between them the ones give way to the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
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

LOAD = 0.75
BATCH = 16  # requests of a decode worker at once, whose steps are in time
SIGMA = 0.3  # of the lengths' logarithms
QUICK = {  # for a day of some minutes, and for workers as slow as these
    "role_interval": 5.0,
    "role_delay": 1.0,
    "arrival_window": 15.0,
    "target_requests": 16.0,
    "target_queued_tokens": 4096.0,
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Kind:
    prompt_tokens: int  # the median
    output_tokens: int


MORNING = Kind(prompt_tokens=2000, output_tokens=30)
EVENING = Kind(prompt_tokens=50, output_tokens=200)


@dataclass(slots=True, frozen=True, kw_only=True)
class Row:
    fleet: str
    morning: float  # share of good answers of the first half of the day
    evening: float  # of the second
    day: float
    num_shifts: int


def day(num_workers: int, times: str, seconds: float, load: float = LOAD, seed: int = 1) -> list[TrafficRequest]:
    time = ModelTime(simulated_time(times).time)
    prompts_per_s = 1 / time.prompt_s(MORNING.prompt_tokens)
    answers_per_s = BATCH / time.decode_s(BATCH, EVENING.prompt_tokens + EVENING.output_tokens / 2)
    rates = prompts_per_s, answers_per_s / EVENING.output_tokens
    found: list[TrafficRequest] = []
    for number, (kind, rate) in enumerate(zip((MORNING, EVENING), rates, strict=True)):
        name, draw = f"{seed}/{number}", random.Random(f"{seed}/{number}")
        peak = arrivals.poisson(load * (num_workers - 1) * rate, draw)
        made = independent(
            (
                at
                for at in itertools.takewhile(lambda at: at < seconds, peak)
                if draw.random() < share(number, at / seconds)
            ),
            sizes.lognormal(kind.prompt_tokens, SIGMA, 1, 4 * kind.prompt_tokens, f"prompts/{name}"),
            sizes.lognormal(kind.output_tokens, SIGMA, 1, 4 * kind.output_tokens, f"outputs/{name}"),
        )
        first_run = number << 20  # prompts of both kinds have nothing in common
        for one in made:
            runs = tuple((first_run + run, length) for run, length in one.runs)
            found.append(TrafficRequest(at=one.at, runs=runs, num_output_tokens=one.num_output_tokens))
    return sorted(found, key=lambda one: one.at)


def share(number: int, part: float) -> float:
    """Of its greatest rate, that a kind has when `part` of the day is over."""
    evening = min(max(3 * part - 1, 0.0), 1.0)
    return evening if number else 1 - evening


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
    early = sum(one.at < seconds / 2 for one in outcome.requests)
    return Row(
        fleet=name or scenario.fleet,
        morning=sum(good[:early]) / early,
        evening=sum(good[early:]) / (len(good) - early),
        day=sum(good) / len(good),
        num_shifts=len(outcome.shifts),
    )


def rows(
    num_workers: int, times: str, seconds: float, ttft_ms: float, tpot_ms: float, load: float = LOAD
) -> Iterator[Row]:
    requests = day(num_workers, times, seconds, load)
    given = {"times": times, "goodput": f"ttft:{ttft_ms:g},tpot:{tpot_ms:g}"}
    for prefill in range(1, num_workers):
        yield play(requests, seconds, prefill=prefill, decode=num_workers - prefill, **given)
    half = num_workers // 2
    moving = {**given, **QUICK, "move_roles": True}
    yield play(requests, seconds, "moving", **moving, prefill=half, decode=num_workers - half)
    yield play(requests, seconds, "moving, all begin with both", **moving, prefill=0, decode=0, both=num_workers)
    yield play(requests, seconds, "all with both roles", prefill=0, decode=0, both=num_workers, **given)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--times", default="xeon-135m")
    parser.add_argument("--seconds", type=float, default=240.0, help="of the day")
    parser.add_argument("--ttft-ms", type=float, default=3000.0)
    parser.add_argument("--tpot-ms", type=float, default=22.0)
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
