"""The planner: exact decisions on written traces (golden/*.txt), and what must hold on any traffic.

A trace is a script and its outcome. Lines that begin with `at` or `options` are the input; the indented lines below are
what the planner said. `GOLDEN_UPDATE=1 pytest ...` writes them anew, for the diff to be read.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.oracle import best_batch, offered
from bench.planner import run_planner, synthetic_day
from common.types import WorkerRole
from router.autoscaler.arrivals import ArrivalRate
from router.autoscaler.planner import Bounds, Planner, PlannerOptions
from router.autoscaler.rules import Needs, TargetRules, Targets
from router.autoscaler.signals import ROLES, FleetSignals, Need, RoleSignals
from simulation.rough_fleet import Hardware, Slo
from tests.examples import examples

GOLDEN = Path(__file__).parent / "golden"


def play(script: str) -> str:
    """The script with the planner's own outcome."""
    lines: list[str] = []
    planner = Planner(PlannerOptions(), TargetRules(Targets()))
    for line in script.splitlines():
        if line.startswith((" ", "\t")):
            continue
        lines.append(line)
        words = line.split()
        if not words or words[0] == "#":
            continue
        fields = dict(word.split("=") for word in words if "=" in word)
        if words[0] == "options":
            planner = make_planner(fields)
            continue
        decisions = planner.step(float(words[1]), signals_of(words[2:], fields))
        for role in ROLES:
            decision = decisions[role]
            lines.append(
                f"    {role.value} {decision.previous} -> {decision.desired}  (" + "; ".join(decision.reasons) + ")"
            )
    return "\n".join(lines) + "\n"


def make_planner(fields: dict[str, str]) -> Planner:
    def bounds(role: str) -> Bounds:
        fewest, _, most = fields.get(role, "1..10").partition("..")
        return Bounds(int(fewest), int(most))

    options = PlannerOptions(
        prefill=bounds("prefill"),
        decode=bounds("decode"),
        tolerance=float(fields.get("tolerance", 0.1)),
        scale_up_delay_s=float(fields.get("up", 3)),
        scale_down_delay_s=float(fields.get("down", 120)),
        idle_timeout_s=float(fields.get("idle", 300)),
    )
    rate = fields.get("rate")
    targets = Targets(queued_tokens=1000, requests=10, prefill_rate=float(rate) if rate else None)
    return Planner(options, TargetRules(targets))


def signals_of(words: list[str], fields: dict[str, str]) -> FleetSignals:
    """`prefill=READY[+SILENT] queued=N decode=READY[+SILENT] requests=N kv=SUM arrive=RATE held=N`."""

    def number_of(role: str) -> tuple[int, int]:
        ready, _, silent = fields.get(role, "1").partition("+")
        return int(ready), int(silent or 0)

    prefill, decode = number_of("prefill"), number_of("decode")
    arrive = fields.get("arrive")
    return FleetSignals(
        prefill=RoleSignals(num_ready=prefill[0], num_silent=prefill[1], queued_tokens=int(fields.get("queued", 0))),
        decode=RoleSignals(
            num_ready=decode[0],
            num_silent=decode[1],
            num_requests=int(fields.get("requests", 0)),
            kv_used=float(fields.get("kv", 0)),
        ),
        arrival_tokens_per_s=None if arrive is None else float(arrive),
        num_held_requests=int(fields.get("held", 0)),
    )


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_golden_trace(path: Path) -> None:
    written = path.read_text()
    played = play(written)
    if os.environ.get("GOLDEN_UPDATE"):
        path.write_text(played)
    assert played == written


class FixedRules:
    """Needs that a test writes down."""

    def __init__(self) -> None:
        self.prefill = Need(1.0, "as told")
        self.decode = Need(1.0, "as told")

    def needs(self, now: float, signals: FleetSignals) -> Needs:
        return Needs(self.prefill, self.decode)


def busy(num_workers: int = 1) -> FleetSignals:
    role = RoleSignals(num_ready=num_workers, num_requests=1)
    return FleetSignals(prefill=role, decode=role)


needs = st.floats(0, 50, allow_nan=False)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 60), needs, needs), min_size=1, max_size=40),
    st.integers(0, 3),
    st.integers(3, 20),
)
def test_desired_stays_within_bounds_once_it_is_there(
    steps: list[tuple[float, float, float]], fewest: int, most: int
) -> None:
    rules = FixedRules()
    bounds = Bounds(fewest, most)
    planner = Planner(PlannerOptions(prefill=bounds, decode=bounds), rules)
    now = 0.0
    for role in ROLES:
        planner.adopt(now, role, fewest)
    for elapsed, prefill, decode in steps:
        now += elapsed
        rules.prefill, rules.decode = Need(prefill, "x"), Need(decode, "x")
        for decision in planner.step(now, busy()).values():
            assert max(fewest, 0) <= decision.desired <= most


@settings(max_examples=examples(60), deadline=None)
@given(st.floats(0, 20, allow_nan=False), st.integers(1, 20))
def test_a_constant_need_is_met_and_then_nothing_changes(need: float, start: int) -> None:
    rules = FixedRules()
    rules.prefill = rules.decode = Need(need, "x")
    options = PlannerOptions(prefill=Bounds(1, 30), decode=Bounds(1, 30))
    planner = Planner(options, rules)
    for role in ROLES:
        planner.adopt(0.0, role, start)
    seen = [planner.step(float(now), busy())[WorkerRole.PREFILL].desired for now in range(1, 400)]
    settled = seen[-1]
    assert settled >= need * (1 - options.tolerance) - 1e-6
    # Never more than one too many, but for the band in which nothing moves.
    assert settled <= max(1, need / (1 - options.tolerance), need + 1) + 1e-6
    changes = [now for now, (a, b) in enumerate(itertools.pairwise(seen)) if a != b]
    assert len(changes) <= 1


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from([4.0, 5.0, 6.0, 7.0, 8.0]), min_size=5, max_size=60))
def test_a_need_that_swings_within_the_window_never_brings_replicas_down(swings: list[float]) -> None:
    rules = FixedRules()
    planner = Planner(PlannerOptions(decode=Bounds(1, 10), scale_down_delay_s=1000.0), rules)
    planner.adopt(0.0, WorkerRole.DECODE, 6)
    desired = 6
    for now, need in enumerate(swings):
        rules.decode = Need(need, "x")
        decision = planner.step(float(now), busy(6))[WorkerRole.DECODE]
        assert decision.desired >= desired
        desired = decision.desired


def desired_with(rules: FixedRules, plenties: list[float | None], *, unknown: float = 0.0) -> list[int]:
    """What is desired in each second, from ten decode workers on, if four are needed."""
    planner = Planner(PlannerOptions(decode=Bounds(1, 10), scale_down_delay_s=30.0), rules)
    planner.adopt(0.0, WorkerRole.DECODE, 10)
    found = []
    for now, plenty in enumerate(plenties, 1):
        rules.decode = Need(4.0, "x", unknown=unknown, exact=True, plenty=plenty)
        found.append(planner.step(float(now), busy(10))[WorkerRole.DECODE].desired)
    return found


def test_workers_beyond_what_is_plenty_go_after_seconds_and_the_others_after_the_delay() -> None:
    assert desired_with(FixedRules(), [6.0] * 31) == [10] * 5 + [6] * 25 + [4]


def test_a_second_in_which_more_are_plenty_keeps_them() -> None:
    assert desired_with(FixedRules(), [6.0, 6.0, 6.0, 8.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0]) == [10] * 5 + [8] * 4 + [6]


def test_nobody_goes_early_if_it_is_not_known_what_is_plenty() -> None:
    assert desired_with(FixedRules(), [None] * 31) == [10] * 30 + [4]
    assert desired_with(FixedRules(), [6.0, 6.0, 6.0, None, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0]) == [10] * 9 + [6]
    assert desired_with(FixedRules(), [6.0] * 20, unknown=1.0) == [10] * 20, "silent workers may be full"


def test_decode_keeps_its_workers_while_prefill_is_short_however_many_are_plenty() -> None:
    rules = FixedRules()
    rules.prefill = Need(5.0, "x", exact=True)  # of one that is ready
    planner = Planner(PlannerOptions(decode=Bounds(1, 10)), rules)
    planner.adopt(0.0, WorkerRole.PREFILL, 5)
    planner.adopt(0.0, WorkerRole.DECODE, 10)
    rules.decode = Need(4.0, "x", exact=True, plenty=6.0)
    signals = replace(busy(10), prefill=RoleSignals(num_ready=1, num_requests=1))
    assert {planner.step(float(now), signals)[WorkerRole.DECODE].desired for now in range(4, 40)} == {10}


@settings(max_examples=examples(100), deadline=None)
@given(st.floats(0, 12), st.floats(0, 6), st.integers(1, 10))
def test_silent_workers_alone_change_nothing(known: float, unknown: float, current: int) -> None:
    rules = FixedRules()
    rules.decode = Need(known, "x", unknown=unknown)
    planner = Planner(PlannerOptions(decode=Bounds(1, 10), scale_up_delay_s=0, scale_down_delay_s=0), rules)
    planner.adopt(0.0, WorkerRole.DECODE, current)
    desired = planner.step(1.0, busy(10))[WorkerRole.DECODE].desired
    if known <= current <= known + unknown:
        assert desired == current
    if known > current:
        assert desired >= current
    if known + unknown < current:
        assert desired <= current


def test_the_ratio_of_the_traffic_is_learned_and_followed() -> None:
    rules = TargetRules(Targets(queued_tokens=1000, prefill_rate=100, requests=10), memory_s=100)

    def signals(arrive: float, requests: int) -> FleetSignals:
        return FleetSignals(
            prefill=RoleSignals(num_ready=2),
            decode=RoleSignals(num_ready=4, num_requests=requests),
            arrival_tokens_per_s=arrive,
        )

    for now in range(60):
        needs = rules.needs(float(now), signals(200, 40))
    assert needs.prefill.workers == pytest.approx(2.0)
    assert needs.decode.workers == pytest.approx(4.0)
    # Twice the arrivals, whose decodes are still to come: P:D stays 1:2.
    needs = rules.needs(60.0, signals(400, 40))
    assert needs.prefill.workers == pytest.approx(4.0)
    assert needs.decode.workers == pytest.approx(8.0, rel=0.05)


def test_no_ratio_is_learned_while_prefill_hides_the_load() -> None:
    rules = TargetRules(Targets(queued_tokens=1000, requests=10), memory_s=10)
    choked = FleetSignals(
        prefill=RoleSignals(num_ready=1, queued_tokens=5000),
        decode=RoleSignals(num_ready=1, num_requests=10),
        arrival_tokens_per_s=100.0,
    )
    for now in range(50):
        needs = rules.needs(float(now), choked)
    assert "as decode followed" not in needs.decode.reason


def test_arrivals_are_averaged_over_the_window() -> None:
    rate = ArrivalRate(window_s=10)
    assert rate.rate() is None
    for now in range(30):
        rate.add(float(now), 100.0 * min(now, 15))
    assert rate.rate() == pytest.approx(0.0)
    rate = ArrivalRate(window_s=10)
    for now in range(30):
        rate.add(float(now), 50.0 * now)
    assert rate.rate() == pytest.approx(50.0)
    rate.add(30.0, 0.0)  # another counter
    assert rate.rate() is None


def test_a_prefill_workers_rate_is_learned_from_what_it_takes() -> None:
    """Two workers, busy half of the time, take 500 tokens/s each while they are; queues come and go meanwhile."""
    rules = TargetRules(Targets(queued_tokens=1e9))
    arrived, queued = 0.0, 0
    reasons = []
    for second in range(400):
        is_busy = second % 2 == 1
        growth = 100 if second % 10 == 1 else -100 if second % 10 == 6 else 0
        arrived += (1000 if is_busy else 0) + growth
        queued += growth
        role = RoleSignals(num_ready=2, num_busy=2 if is_busy else 0, queued_tokens=queued)
        signals = FleetSignals(prefill=role, arrival_tokens_per_s=800.0, arrived_tokens=arrived)
        need = rules.needs(float(second), signals).prefill
        reasons.append(need.reason)
    assert not any("as learned" in reason for reason in reasons[:30]), "not from the first few seconds"
    assert need.workers == pytest.approx(800 / (500 * 0.8), rel=0.02)
    assert need.reason.endswith("per worker as learned")


def test_nothing_is_learned_if_workers_come_and_go_or_are_silent() -> None:
    rules = TargetRules(Targets(queued_tokens=1e9))
    for second in range(400):
        role = RoleSignals(num_ready=1 + second % 2, num_busy=1, num_silent=0 if second < 200 else 1)
        signals = FleetSignals(prefill=role, arrival_tokens_per_s=800.0, arrived_tokens=1000.0 * second)
        assert rules.needs(float(second), signals).prefill.workers == 0


@pytest.mark.parametrize("rate", ["given", pytest.param("learned", marks=pytest.mark.slow)])
def test_a_day_is_served_with_less_than_its_peak_needs(rate: str) -> None:
    """The comparison that bench/planner.py prints, without its oracle: decisions must not get worse unnoticed."""
    jobs, hardware, slo = synthetic_day(), Hardware(), Slo()
    targets = Targets(
        queued_tokens=hardware.prefill_rate * slo.ttft_s / 2,
        prefill_rate=hardware.prefill_rate * 0.8 if rate == "given" else None,
        requests=best_batch(hardware, slo) * 0.8,
    )
    options = PlannerOptions(prefill=Bounds(1, 64), decode=Bounds(1, 64))
    planned = run_planner(jobs, hardware, slo, options, TargetRules(targets), learns=rate == "learned")
    assert planned.slo_ok > 0.97
    peak = [max(load[role] for load in offered(jobs, hardware, slo, 60.0)) for role in (0, 1)]
    assert planned.hours < 0.85 * sum(peak)
    assert planned.num_changes < 60


def test_until_a_rate_is_learned_the_workers_models_of_time_say_it() -> None:
    rules = TargetRules(Targets(queued_tokens=1e9))
    role = RoleSignals(num_ready=1, num_busy=1, predicted_rate=1000.0)
    need = rules.needs(0.0, FleetSignals(prefill=role, arrival_tokens_per_s=1600.0, arrived_tokens=0.0)).prefill
    assert need.workers == 2
    assert need.reason.endswith("800 per worker as predicted")
    given = TargetRules(Targets(queued_tokens=1e9, prefill_rate=400.0))
    assert given.needs(0.0, FleetSignals(prefill=role, arrival_tokens_per_s=1600.0)).prefill.workers == 4
