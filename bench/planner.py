"""The planner on recorded traffic, against an oracle that knows the future.

    python -m bench.planner [TRACE.jsonl ...] [--planner signals] [--share 0.9] [--json]

A trace has one JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens). Without one, a day of
synthetic traffic is made, pressed into an hour. Both sides drive the same simulated fleet (`simulation.rough_fleet`).
What is compared is worker-hours at equal SLO attainment.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench.oracle import best_batch, offered, run_oracle
from common.types import WorkerRole
from router.autoscaler.model_rules import LatencyGoal, ModelRules
from router.autoscaler.planner import Bounds, Planner, PlannerOptions
from router.autoscaler.rules import Rules, TargetRules, Targets
from router.autoscaler.signals import FleetSignals
from simulation.rough_fleet import Hardware, Job, Outcome, Slo, simulate


def run_planner(
    jobs: Sequence[Job],
    hardware: Hardware,
    slo: Slo,
    options: PlannerOptions,
    rules: Rules,
    history: list[tuple[int, int]] | None = None,
    *,
    learns: bool = False,
) -> Outcome:
    """`history` is given what was desired in each second. With `learns` the planner is told how much has arrived in
    all, by which rules can learn a prefill worker's rate."""
    planner = Planner(options, rules)

    def plan(now: float, read: Callable[[], FleetSignals]) -> tuple[int, int]:
        signals = read()
        decisions = planner.step(now, signals if learns else replace(signals, arrived_tokens=None))
        wanted = decisions[WorkerRole.PREFILL].desired, decisions[WorkerRole.DECODE].desired
        if history is not None:
            history.append(wanted)
        return wanted

    return simulate(jobs, hardware, slo, plan, _first_guess(jobs, hardware, slo), startup_s=hardware.startup_s)


def _first_guess(jobs: Sequence[Job], hardware: Hardware, slo: Slo) -> tuple[int, int]:
    """What both start from: the first two minutes' load, as an operator would have set it."""
    loads = offered(jobs, hardware, slo, 120.0)
    return math.ceil(loads[0][0] * 1.2), math.ceil(loads[0][1] * 1.2)


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
    parser.add_argument("--planner", choices=("model", "signals"), default="model", help="what it plans by")
    parser.add_argument("--share", type=float, default=0.95, help="of requests within SLO that the model plans for")
    parser.add_argument(
        "--scale-down-delay", type=float, help="seconds; by default the start of a worker, and 120 by signals"
    )
    parser.add_argument("--utilization", type=float, default=0.8, help="share of a worker's rate that it is given")
    parser.add_argument(
        "--rate",
        choices=("given", "learned", "unknown"),
        default="given",
        help="a prefill worker's, to the planner by signals",
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
    by_model = options.planner == "model"
    targets = Targets(
        # A queue that takes half of the TTFT to compute.
        queued_tokens=hardware.prefill_rate * slo.ttft_s / 2,
        prefill_rate=hardware.prefill_rate * options.utilization if options.rate == "given" and not by_model else None,
        requests=best_batch(hardware, slo) * options.utilization,
    )
    delay_s = options.scale_down_delay
    if delay_s is None:
        delay_s = hardware.startup_s if by_model else 120.0
    planner = PlannerOptions(prefill=Bounds(1, 64), decode=Bounds(1, 64), scale_down_delay_s=delay_s)
    goal = LatencyGoal(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, share=options.share, startup_s=hardware.startup_s)
    rows = []
    for name, jobs in traffic.items():
        history: list[tuple[int, int]] = []
        rules: Rules = TargetRules(targets)
        if by_model:
            rules = ModelRules(goal, rules)
        learns = by_model or options.rate == "learned"
        planned = run_planner(jobs, hardware, slo, planner, rules, history, learns=learns)
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
